"""What ``strop.backend`` needs beside the stages: targets, and what joins two of them."""
