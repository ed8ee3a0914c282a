"""The benchmark for accelerators runs on the CPU, with a tiny network; its server and networks."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.waiting import until

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_parts_are_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The other parts, in processes of their own, are in the short run of all benchmarks.
    monkeypatch.syspath_prepend(str(FOLDER))
    arguments = ["--smoke", "--device=cpu", "--part", "images", f"--output={tmp_path}"]
    monkeypatch.setattr("sys.argv", [str(FOLDER / "accelerator.py"), *arguments])
    from accelerator import main

    main()
    assert "threads" in capsys.readouterr().out
    (images,) = json.loads((tmp_path / "accelerator.json").read_text())["parts"]
    assert [row["by"] for row in images["rows"]] == ["threads"] * 2 + ["processes"] * 2
    assert all(row["images_per_s"] > 0 for row in images["rows"])
    assert (tmp_path / "accelerator.md").read_text().startswith("## ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nothing_is_measured_without_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from accelerator import main

    for device in ("cpu", "cuda"):
        monkeypatch.setattr("sys.argv", ["accelerator.py", "--device", device])
        with pytest.raises(SystemExit) as refused:
            main()
        assert refused.value.code == 2 and "--smoke" in capsys.readouterr().err


@pytest.mark.parametrize(("depth", "parameters"), [(18, 11_689_512), (50, 25_557_032)])
def test_networks_have_the_parameters_of_torchvisions(
    monkeypatch: pytest.MonkeyPatch, depth: int, parameters: int
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from resnet import resnet

    network = resnet(depth)
    assert sum(each.numel() for each in network.parameters()) == parameters
    assert network(torch.zeros(2, 3, 64, 64)).shape == (2, 1000)


def test_a_network_for_small_images_keeps_their_pixels_for_its_first_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from importance_model import build

    network = build("resnet18", 10)
    stem = network.features[:3](torch.zeros(1, 3, 32, 32))  # type: ignore[index]
    assert stem.shape == (1, 64, 32, 32)
    logits, embeddings = network(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    assert logits.shape == (2, 10) and embeddings.shape == (2, 512)


def test_the_server_for_machines_without_nginx(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from feed_servers import answers, free_port

    (tmp_path / "a.jpg").write_bytes(b"pixels")
    port = free_port()
    command = [sys.executable, str(FOLDER / "file_server.py"), str(port), str(tmp_path), "2"]
    with subprocess.Popen(command) as server:
        try:
            until(lambda: answers(port))
            connection = http.client.HTTPConnection("127.0.0.1", port)
            for method, path, status, body in (
                ("GET", "/a.jpg", 200, b"pixels"),
                ("HEAD", "/a.jpg", 200, b""),
                ("GET", "/b.jpg", 404, b""),
            ):
                connection.request(method, path)
                answer = connection.getresponse()
                assert (answer.status, answer.read()) == (status, body)
            connection.close()
        finally:
            server.terminate()
