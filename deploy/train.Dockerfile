# Training, for the profile `train` of compose.yaml: the service's image and the package training.
#
#   docker build -t chargpt . && docker build -t chargpt-train -f deploy/train.Dockerfile .
ARG BASE=chargpt
FROM scratch AS wheels

# BASE is chosen outside.
# hadolint ignore=DL3006
FROM ${BASE}
USER 0
WORKDIR /src
COPY pyproject.toml .
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,from=wheels,target=/wheels \
    python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    print(*p['optional-dependencies']['training'], sep='\n')" > requirements.txt \
 && PIP_PYTHON=/venv/bin/python PIP_FIND_LINKS=/wheels pip install --disable-pip-version-check -r requirements.txt
COPY training /venv/lib/python3.11/site-packages/training
WORKDIR /
USER 10001
HEALTHCHECK NONE
ENTRYPOINT ["python", "-m", "training"]
