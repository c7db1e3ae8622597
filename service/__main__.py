"""Serve a checkpoint: python -m service --checkpoint DIR

Run with --help for the settings.
"""

import os
import signal
import sys
import tempfile


def main() -> int:
    """Exit status: 0 after a signal, 1 when the server failed, 2 for bad settings or a bad checkpoint."""
    # As PID 1 of a container a process has no default action: without this it could not be stopped while it loads.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from service.settings import program, read_settings

    settings = read_settings()
    # GNU OpenMP's threads spin while they wait, beside HTTP processes that want the core.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    with tempfile.TemporaryDirectory(prefix="chargpt-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # read when prometheus_client is imported

        from service.model.checkpoint import CheckpointError
        from service.server import WorkerStartError, build_server

        try:
            server = build_server(settings)
        except CheckpointError as error:
            print(f"{program()}: {error}", file=sys.stderr)
            return 2
        try:
            server.serve()
        except WorkerStartError as error:
            print(f"{program()}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
