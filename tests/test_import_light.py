"""``import stoker`` stays light: no framework, no cloud client, no warning."""

import json
import subprocess
import sys

CODE = "import json, sys, stoker; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"

HEAVY = {
    *("torch", "torchdata", "torchvision", "PIL", "simplejpeg"),
    *("obstore", "fsspec", "boto3", "botocore", "aiohttp", "requests", "redis"),
    *("scipy", "sklearn", "matplotlib", "pandas", "lmdb", "libcachesim"),
    *("click", "rich", "prometheus_client", "msgspec", "pytest", "hypothesis"),
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_import_loads_nothing_heavy_and_warns_of_nothing() -> None:
    done = run(CODE)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    loaded = set(json.loads(done.stdout))
    assert "stoker" in loaded
    assert not loaded & HEAVY


def test_an_epoch_needs_no_framework() -> None:
    """Every module of ``stoker.epoch``: what a loader for another framework is made of."""
    done = run(
        "import importlib, json, pkgutil, sys, stoker.epoch as e\n"
        "for m in pkgutil.iter_modules(e.__path__, e.__name__ + '.'):\n"
        "    importlib.import_module(m.name)\n"
        "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    )
    assert done.returncode == 0, done.stderr
    assert not set(json.loads(done.stdout)) & HEAVY


def test_import_starts_no_thread_and_no_process() -> None:
    done = run(
        "import stoker, threading, multiprocessing as m; "
        "print(threading.active_count(), len(m.active_children()))"
    )
    assert done.stdout.split() == ["1", "0"], done.stderr


def test_import_loads_few_modules_and_the_rest_when_it_is_used() -> None:
    done = run(
        "import stoker, sys\n"
        "few = [m for m in sys.modules if m.split('.')[0] == 'stoker']\n"
        "stoker.recipes.get('shade'), stoker.Arena, stoker.Feed, dir(stoker)\n"
        "print(len(few), 'torch' in sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    count, has_torch = done.stdout.split()
    assert int(count) <= 60
    assert has_torch == "False"
