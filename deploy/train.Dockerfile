# Training, for the profile `train` of compose.yaml: the service's image and the package training.
#
#   docker build -t chargpt . && docker build -t chargpt-train -f deploy/train.Dockerfile .
ARG BASE=chargpt
ARG COMPILER=python:3.11-slim-bookworm
FROM scratch AS wheels

# As the service's, with the same layers: a compiler of the same Debian.
FROM ${COMPILER} AS compiler
# Debian keeps one version of g++ per release: a pinned one would be gone after its next security update.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -r /var/lib/apt/lists
WORKDIR /src
COPY setup.py .
COPY training/model/fused.cpp training/model/
RUN CXXFLAGS=-s python setup.py --quiet build_ext --build-lib /native \
 && python -c "from setup import *; [open(f'/native/training/model/_fused_{name}.so') for name in VARIANTS[FUSED]]"

# BASE is chosen outside.
# hadolint ignore=DL3006
FROM ${BASE}
USER 0
COPY deploy/image/torch.txt deploy/image/train.txt /locks/
ARG TORCH_INDEX_URL
# The service's image has no pip: it is the compiler's. Nor has it torch, unless it is one with CUDA.
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=bind,from=compiler,source=/usr/local/lib/python3.11/site-packages/pip,target=/pip/pip \
    export PYTHONPATH=/pip PIP_FIND_LINKS=/wheels PIP_DISABLE_PIP_VERSION_CHECK=1 \
 && index=${TORCH_INDEX_URL-https://download.pytorch.org/whl/cpu} \
 && if ! python -c "import torch" 2>/dev/null; then set -- -r /locks/torch.txt; fi \
 && python -m pip install --no-compile --no-deps --only-binary :all: --require-hashes \
    ${index:+--extra-index-url "$index"} -r /locks/train.txt "$@" \
 && python -m pip check
COPY training /venv/lib/python3.11/site-packages/training
COPY --from=compiler /native/training /venv/lib/python3.11/site-packages/training
USER 10001
HEALTHCHECK NONE
ENTRYPOINT ["python", "-m", "training"]
