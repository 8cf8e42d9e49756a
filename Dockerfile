# An image with Strop and its notebook. The commands are those of README.md.
#   docker build -t strop .
#   docker run --gpus all -it strop strop bench train P8 --only strop,diffusers
ARG BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel
FROM ${BASE}

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/strop
COPY . .

# torch and Triton are those of the base image.
RUN pip install -e ".[diffusion]"
RUN pip install -e ".[train]" notebook

CMD jupyter notebook examples/dreambooth.ipynb --ip 0.0.0.0 --no-browser --allow-root
