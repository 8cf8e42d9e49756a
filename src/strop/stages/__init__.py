"""``strop.backend`` needs these beside the stages: targets, and what joins two of them."""
