"""Serve a checkpoint: python -m service --checkpoint DIR

Run with --help for the settings.
"""

import contextlib
import gc
import os
import select
import shutil
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.settings import Settings

if __name__ in ("__main__", "__mp_main__"):  # __mp_main__: an inference process
    gc.disable()  # during imports, which leave little garbage


def main() -> int:
    """Return 0 after a signal, 1 if the server failed, 2 for bad settings, a bad checkpoint or a taken port."""
    if sys.stderr is None:  # the caller closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.set_inheritable(2, True)  # for all processes
        sys.stderr = open(2, "w")
    # PID 1 of a container has no default action for signals. Without this, it cannot be stopped while loading.
    # os._exit, not an exception: C extensions may swallow or change one raised during their import.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until Server.run
    if sys.argv[1:] == ["--version"]:
        from service import release

        print(f"chargpt {release()}")
        return 0
    # NumPy's threads would compete with the engine's for the CPUs. OpenBLAS reads this when NumPy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from service.settings import read_settings

    return serve(read_settings())


def serve(settings: "Settings", **options: Any) -> int:
    """Serve until a signal, and return the exit status of `main`. `options` are those of `build_server`."""
    from service.process import FolderError, run_folder
    from service.settings import program

    # GNU OpenMP's threads spin while they wait, and take the core from HTTP processes.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    status = 0
    problem: Exception | None = None
    try:
        with run_folder() as folder:
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)  # read when prometheus_client is imported

            def stop(*_: object) -> None:
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(0)

            signal.signal(signal.SIGTERM, stop)  # these until Server.run
            signal.signal(signal.SIGINT, stop)

            from service.http.connection.limits import OpenFilesError
            from service.model.checkpoint import CheckpointError
            from service.placement import BackendError
            from service.server import StartError, build_server
            from service.supervisor import TooManyDeathsError

            try:
                build_server(settings, **options).run()
            except (CheckpointError, BackendError, OpenFilesError) as error:
                status, problem = 2, error
            except (StartError, TooManyDeathsError) as error:
                status, problem = 1, error
    except FolderError as error:
        status, problem = 2, error
    with contextlib.suppress(OSError):
        if (
            problem is not None and select.select([], [2], [], 1)[1]
        ):  # otherwise nobody reads stderr, and print would wait forever
            print(f"{program()}: {problem}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
