"""The command line against real processes: Redis, Ray, two ranks, a draft and a router."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Cluster, MakeCluster
else:
    Cluster = MakeCluster = Any

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = "def add("
SAMPLED = ("--temperature", "0.8", "--seed", "7", "--max-tokens", "24")


# ---- a cluster that runs ----


def test_generate_streams_text_and_json_says_the_same(running_cluster: Cluster) -> None:
    text = running_cluster.ok("generate", "-p", PROMPT, *SAMPLED)
    answer = running_cluster.generate(PROMPT, *SAMPLED)
    assert text == answer["text"] + ("" if answer["text"].endswith("\n") else "\n")
    assert set(answer) == {
        "request_id",
        "text",
        "token_ids",
        "finish_reason",
        "matched_stop",
        "logprobs",
        "prompt_logprobs",
        "usage",
        "seed",
        "reproducible",
        "speculation",
        "timing",
    }
    assert answer["seed"] == 7
    assert answer["finish_reason"] in ("stop", "length")
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])
    assert answer["speculation"]["verifier"] == "coupled"


@pytest.mark.parametrize(
    ("options", "verifier"),
    [
        (("--temperature", "0"), "greedy"),
        (("--temperature", "1", "--verifier", "coupled", "--seed", "3"), "coupled"),
        (("--temperature", "1", "--verifier", "rejection", "--top-k", "40", "--top-p", "0.9"), "rejection"),
    ],
)
def test_each_verifier_answers_through_all_processes(
    running_cluster: Cluster, options: tuple[str, ...], verifier: str
) -> None:
    def speculated() -> dict[str, Any] | None:
        """An answer with a proposal in it: nobody waits for a draft that a busy machine makes slow."""
        answer = running_cluster.generate(PROMPT, "--max-tokens", "16", *options)
        assert answer["speculation"]["verifier"] == verifier
        assert 1 <= len(answer["token_ids"]) <= 16
        return answer if answer["speculation"]["num_draft_tokens"] > 0 else None

    answer = running_cluster.wait_for(speculated, f"a proposal that was verified by {verifier}")
    if verifier != "rejection":
        plain = running_cluster.generate(PROMPT, "--max-tokens", "16", *options, "--num-speculative-tokens", "0")
        assert plain["speculation"]["num_draft_tokens"] == 0
        assert plain["token_ids"] == answer["token_ids"]


def test_the_prompt_comes_from_standard_input_as_it_is(running_cluster: Cluster) -> None:
    given = running_cluster.generate(PROMPT, *SAMPLED)
    piped = json.loads(running_cluster.ok("generate", "--json", *SAMPLED, input=PROMPT))
    assert piped["token_ids"] == given["token_ids"]


def test_stop_strings_and_max_tokens_end_the_text(running_cluster: Cluster) -> None:
    whole = running_cluster.generate(PROMPT, *SAMPLED)
    stop = whole["text"][3:5]
    cut = running_cluster.generate(PROMPT, *SAMPLED, "--stop", "never in this text", "--stop", stop)
    assert (cut["finish_reason"], cut["matched_stop"]) == ("stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    one = running_cluster.generate(PROMPT, "--temperature", "0.8", "--seed", "7", "--max-tokens", "1")
    assert one["token_ids"] == whole["token_ids"][:1]


def test_status_shows_group_ranks_epoch_drafts_queue_and_cache(running_cluster: Cluster) -> None:
    status = running_cluster.wait_until_whole()
    (group,) = status["groups"]
    assert group["state"] == "ready"
    assert group["epoch"] >= 1
    assert group["tensor_parallel_size"] == 2
    assert [rank["rank"] for rank in group["ranks"]] == [0, 1]
    assert all(psutil.pid_exists(rank["pid"]) for rank in group["ranks"])
    assert 0 < group["kv_blocks_free"] <= group["kv_blocks_total"]
    assert (status["running"], status["queued"]) == (0, 0)
    assert [draft["state"] for draft in status["drafts"]] == ["ready"]
    assert status["settings"] == {"num_speculative_tokens": 4, "verifier": "coupled"}
    assert status["router_address"] == running_cluster.address
    assert psutil.pid_exists(status["supervisor"]["pid"])
    text = running_cluster.ok("status")
    assert f"epoch {group['epoch']}" in text
    assert "draft-0" in text
    remote = json.loads(running_cluster.ok("status", "--json", "--address", running_cluster.address))
    assert remote["groups"][0]["epoch"] == group["epoch"]
    assert remote["supervisor"] is None


def test_wrong_values_are_one_line_that_names_the_option(running_cluster: Cluster) -> None:
    assert "--top-p is 1.5" in running_cluster.refusal("generate", "-p", "x", "--top-p", "1.5")
    assert "--temperature is -1" in running_cluster.refusal("generate", "-p", "x", "--temperature", "-1")
    assert "--verifier is 'lucky'" in running_cluster.refusal("generate", "-p", "x", "--verifier", "lucky")
    assert "--max-tokens" in running_cluster.refusal("generate", "-p", "x", "--max-tokens", "0")
    assert "-p is" in running_cluster.refusal("generate", "-p", "")
    assert "--seed" in running_cluster.refusal("generate", "-p", "x", "--seed", "x", status=2)
    assert "--colour" in running_cluster.refusal("generate", "--colour", "red", status=2)


def test_up_twice_is_one_line(running_cluster: Cluster) -> None:
    before = {process.pid for process in running_cluster.processes()}
    for extra in (("--detach",), ()):
        line = running_cluster.refusal("up", "-f", str(running_cluster.settings_file), *extra)
        assert "already running" in line
        assert "outrider down" in line
    assert before <= {process.pid for process in running_cluster.processes()}
    running_cluster.wait_until_whole()


# ---- parts that die ----


def test_a_killed_draft_costs_no_text_and_comes_back(running_cluster: Cluster) -> None:
    (draft,) = running_cluster.wait_until_whole()["drafts"]
    before = running_cluster.generate(PROMPT, *SAMPLED)
    os.kill(draft["pid"], signal.SIGKILL)
    assert running_cluster.generate(PROMPT, *SAMPLED)["token_ids"] == before["token_ids"]

    def another() -> Any:
        status = running_cluster.peek() or {"drafts": []}
        ready = [other for other in status["drafts"] if other["state"] == "ready"]
        return ready if [other["pid"] for other in ready] not in ([], [draft["pid"]]) else None

    (new,) = running_cluster.wait_for(another, "another draft")
    assert new["draft_id"] != draft["draft_id"]

    def is_heard() -> bool:  # nobody waits for a draft that a busy machine makes slow
        after = running_cluster.generate(PROMPT, *SAMPLED)
        assert after["token_ids"] == before["token_ids"]
        return int(after["speculation"]["num_draft_tokens"]) > 0

    running_cluster.wait_for(is_heard, "a proposal of the new draft")


@pytest.mark.parametrize("rank", [1, 0])
def test_a_killed_rank_leads_to_a_new_group_with_a_higher_epoch(running_cluster: Cluster, rank: int) -> None:
    (group,) = running_cluster.wait_until_whole()["groups"]
    before = running_cluster.generate(PROMPT, *SAMPLED)
    os.kill(group["ranks"][rank]["pid"], signal.SIGKILL)

    def rebuilt() -> Any:
        (now,) = (running_cluster.peek() or {"groups": [group]})["groups"]
        return now if now["epoch"] > group["epoch"] and now["state"] == "ready" else None

    now = running_cluster.wait_for(rebuilt, "a group of a higher epoch")
    old, new = ({rank["pid"] for rank in each["ranks"]} for each in (group, now))
    assert not old & new
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in old)
    assert running_cluster.generate(PROMPT, *SAMPLED)["token_ids"] == before["token_ids"]


@pytest.mark.parametrize("role", ["router", "redis-server"])
def test_a_killed_router_or_redis_is_started_again(running_cluster: Cluster, role: str) -> None:
    running_cluster.wait_until_whole()
    before = running_cluster.generate(PROMPT, *SAMPLED)
    (pid,) = [child["pid"] for child in running_cluster.state()["children"] if child["role"] == role]
    os.kill(pid, signal.SIGKILL)

    def replaced() -> bool:
        children = {child["role"]: child["pid"] for child in running_cluster.state()["children"]}
        return children.get(role, pid) != pid

    running_cluster.wait_for(replaced, f"another {role}")
    running_cluster.wait_until_whole()
    assert running_cluster.generate(PROMPT, *SAMPLED)["token_ids"] == before["token_ids"]


# ---- starts that fail ----


def test_a_missing_model_is_named_and_nothing_is_left(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(target={"model": str(tmp_path / "nowhere")})
    for extra in (("--detach",), ()):
        line = cluster.refusal("up", "-f", str(cluster.settings_file), *extra)
        assert line.startswith("error: target.model: the model folder")
        assert str(tmp_path / "nowhere") in line
    assert cluster.processes() == []


def test_m1_a_draft_of_another_tokenizer_is_refused_with_both_fingerprints(
    make_cluster: MakeCluster, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    from outrider.core.fingerprint import tokenizer_fingerprint

    target, draft = tiny_pair
    other = tmp_path / "other"
    other.mkdir()
    for path in draft.iterdir():
        if path.name != "tokenizer.json":
            (other / path.name).symlink_to(path)
    table = json.loads((draft / "tokenizer.json").read_text())
    table["added_tokens"].append({**table["added_tokens"][0], "id": 1_000, "content": "<|another|>"})
    (other / "tokenizer.json").write_text(json.dumps(table))
    cluster = make_cluster(drafts=[{"name": "draft", "model": str(other)}])
    line = cluster.refusal("up", "-f", str(cluster.settings_file), "--detach")
    assert line.startswith("error: drafts.0.model")
    assert tokenizer_fingerprint(target) in line
    assert tokenizer_fingerprint(other) in line
    assert cluster.processes() == []


def test_a_taken_port_is_named_and_nothing_is_left(make_cluster: MakeCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = make_cluster(router={"port": port})
        line = cluster.refusal("up", "-f", str(cluster.settings_file), "--detach")
    assert f"router.port: cannot listen on 127.0.0.1:{port}" in line
    assert cluster.processes() == []


def test_a_dead_redis_is_named_and_nothing_is_left(make_cluster: MakeCluster) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}/0"
        cluster = make_cluster(redis={"url": url})
        line = cluster.refusal("up", "-f", str(cluster.settings_file), "--detach")
    assert url in line
    assert "redis.url" in line
    assert cluster.processes() == []


def test_a_ray_that_does_not_answer_is_named(make_cluster: MakeCluster) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        cluster = make_cluster(ray={"address": address})
        line = cluster.refusal("up", "-f", str(cluster.settings_file), "--detach")
    assert address in line
    assert "ray.address" in line
    assert cluster.processes() == []


def test_wrong_settings_are_named(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(target={"tensor_parallel_size": 0})
    assert "target.tensor_parallel_size" in cluster.refusal("up", "-f", str(cluster.settings_file), "--detach")
    assert "/no/such/file" in cluster.refusal("up", "-f", "/no/such/file")


def test_without_a_cluster_each_command_says_so(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    assert "outrider up" in cluster.refusal("generate", "-p", "x")
    assert "outrider up" in cluster.refusal("status")
    assert "'other' is not running" in cluster.refusal("status", "--cluster", "other")
    done = cluster.outrider("down")
    assert (done.returncode, done.stderr) == (0, "no cluster is running\n")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        assert address in cluster.refusal("generate", "-p", "x", "--address", address)


# ---- ends ----


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def mapped_memory() -> set[str]:
    """Shared memory that living processes use: those of other clusters on this machine come and go."""
    mapped: set[str] = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            mapped |= set(re.findall(r" /dev/shm/(\S+)", maps))
    return mapped


def test_ctrl_c_in_the_foreground_stops_everything(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    segments = shared_memory()
    command = [sys.executable, "-P", "-m", "outrider.cluster.cli", "up", "-f", str(cluster.settings_file)]
    with subprocess.Popen(
        command, env=cluster.environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as supervisor:
        assert supervisor.stderr is not None
        lines = []
        for line in supervisor.stderr:
            lines.append(line)
            if line.startswith(("ready:", "error:")):
                break
        assert lines[-1].startswith("ready:"), lines
        assert cluster.generate(PROMPT, *SAMPLED)["token_ids"]
        scratch = [Path(path) for path in cluster.state()["scratch"]]
        assert scratch
        os.killpg(supervisor.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        assert supervisor.wait(100) == 0
    assert cluster.processes() == []
    assert not (shared_memory() - segments - mapped_memory())
    assert not any(path.exists() for path in scratch)
    assert not (cluster.state_folder / "state.json").exists()


def test_what_a_killed_supervisor_left_is_cleared_by_down(make_cluster: MakeCluster) -> None:
    cluster = make_cluster()
    cluster.up()
    scratch = [Path(path) for path in cluster.state()["scratch"]]
    os.kill(cluster.state()["supervisor_pid"], signal.SIGKILL)
    assert "not running" in cluster.refusal("status", "--cluster", cluster.name)
    done = cluster.outrider("down", "--cluster", cluster.name)
    assert done.returncode == 0
    cluster.wait_for(lambda: not cluster.processes(), "the end of all processes", timeout_s=60)
    assert not any(path.exists() for path in scratch)


def test_the_command_line_starts_without_heavy_libraries(running_cluster: Cluster) -> None:
    heavy = ("torch", "ray", "transformers", "deepspeed", "redis", "numpy")
    probe = (
        "import sys; from outrider.cluster import cli; sys.argv[1:] = sys.argv[1:]\n"
        "try: cli.main()\n"
        f"finally: sys.stderr.write('LOADED ' + ' '.join(name for name in {heavy!r} if name in sys.modules))"
    )
    for args in (["status"], ["generate", "-p", PROMPT, "--max-tokens", "2"]):
        done = subprocess.run(
            [sys.executable, "-P", "-c", probe, *args],
            env=running_cluster.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.rpartition("LOADED ")[2] == ""
