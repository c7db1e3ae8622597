# Training, for the profile `train` of compose.yaml: the service's image and the package training.
#
#   docker build -t chargpt . && docker build -t chargpt-train -f deploy/train.Dockerfile .
ARG BASE=chargpt
FROM scratch AS wheels

# BASE is chosen outside.
# hadolint ignore=DL3006
FROM ${BASE}
USER 0
COPY deploy/image/train.txt /lock.txt
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,from=wheels,target=/wheels \
    PIP_PYTHON=/venv/bin/python PIP_FIND_LINKS=/wheels PIP_DISABLE_PIP_VERSION_CHECK=1 \
    pip install --no-compile --no-deps --only-binary :all: --require-hashes -r /lock.txt \
 && pip check
COPY training /venv/lib/python3.11/site-packages/training
USER 10001
HEALTHCHECK NONE
ENTRYPOINT ["python", "-m", "training"]
