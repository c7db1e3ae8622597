from tests.bench import gpu
from tests.helpers import save_random

RESULTS = {
    "machine": {"cpu": "C", "gpu": "G"},
    "versions": {"torch": "2.13.0"},
    "cuda": "13.0",
    "date": "2026-11-22T00:00:00",
    "revision": "abc",
    "errors": {"image": "BenchError: no space"},
    "parts": {
        "tests": {"summary": "30 passed in 60 s"},
        "engine": {
            "runs": [
                {"shape": "M", "dtype": "float32", "rows": 512, "characters_per_second": 7e5,
                 "bandwidth_share": 0.7, "product_share": 0.2,
                 "profile": [{"name": "gemm", "calls": 12, "share": 0.4}]}
            ],
            "absent": {"M float32, 2048 rows": "its process ended"},
        },
        "http": {
            "runs": [
                {"system": "ours float32", "clients": 512, "mode": "streamed", "characters_per_second": 3e5}
            ],
            "first": {"ours float32": {"p50": 0.003, "p95": 0.005}},
            "absent": {"vllm bfloat16": "ServerError: x\nnot ready"},
        },
        "training": {
            "compiled": {"whole": 1.41, "wall_seconds": 100.0, "characters_per_second": 5e6, "peak_share": 0.3}
        },
    },
}  # fmt: skip


def test_report_shows_every_part_and_what_is_missing():
    text = gpu.markdown(RESULTS)
    for line in (
        "G, torch 2.13.0 with CUDA 13.0, 2026-11-22, revision abc",
        "| M float32 | 512 | 700,000 | 70% | 20% |",
        "| `gemm` | 12 | 40% |",
        "| ours float32 | 512 | streamed | 300,000 |",
        "| ours float32 | 3.00 | 5.00 |",
        "| compiled | 1.4100 | 100 | 5,000,000 | 30.0% |",
        "- M float32, 2048 rows was not measured: its process ended",
        "- vllm bfloat16 was not measured: not ready",
        "- image failed: BenchError: no space",
    ):
        assert line in text.splitlines()
    empty = gpu.markdown(RESULTS | {"parts": {}, "errors": {}})
    assert all(f"- {part} was not run" in empty for part in gpu.PARTS)


def test_every_system_serves_the_same_folder_on_the_gpu(tmp_path):
    save_random(tmp_path / "m")
    systems = gpu.gpu_systems(tmp_path / "m")
    assert [s.family for s in systems[:4]] == ["ours", "ours", "stock", "stock"]
    assert all(any(str(tmp_path / "m") in part for part in system.command) for system in systems)
    ours = systems[0].command
    assert {"--accelerator=cuda", "--dtype=float32", "--max-running-requests=512"} <= set(ours)
