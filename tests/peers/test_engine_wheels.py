"""Published programs against the CPU engine: lm-evaluation-harness, openai's client, SGLang's router."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from protocol.runtime.net import free_port
from tests.support.engine_http import write_policy

Client = Callable[..., Any]
Did = Callable[[str, str], None]
START_S = 90.0
QUESTIONS = [
    {"question": "where is müller?", "choices": ["search", "here", "東京"], "gold": 0},
    {"question": "is where?", "choices": ["where", "is müller"], "gold": 1},
]
CHOICE = (
    "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{gold}}'\n"
    "metric_list: [{metric: acc}]\n"
)
UNTIL = (
    "output_type: generate_until\ndoc_to_target: '{{choices[0]}}'\nmetric_list: [{metric: exact_match}]\n"
    "generation_kwargs: {until: ['e'], max_gen_toks: 12, temperature: 0}\n"
)
GREEDY = {"max_new_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_policy(tmp_path_factory.mktemp("policy"))


@contextlib.contextmanager
def process(argv: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Ends with its children."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            argv, stdout=output, stderr=output, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        child.wait(30)


@contextlib.contextmanager
def engine(policy: Path, log: Path) -> Iterator[str]:
    argv = [sys.executable, "-m", "rollout_server.cpu_engine", "--model-path", str(policy), "--port", "0"]
    with process(argv, log) as child:
        until(lambda: "listening on " in log.read_text(), child, log)
        yield log.read_text().split("listening on ")[1].split()[0]


def until(done: Callable[[], bool], child: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while not done():
        assert child.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def url(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with engine(policy, tmp_path_factory.mktemp("engine") / "log") as address:
        yield address


class Independent:
    """The same answers by transformers and tokenizers, without the engine."""

    def __init__(self, policy: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_file(str(policy / "tokenizer.json"))

    def score(self, context: str, continuation: str) -> tuple[float, bool]:
        """Log-likelihood of the continuation, and whether it is what greedy decoding says."""
        ids, start = self.tokenizer.encode(context + continuation).ids, len(self.tokenizer.encode(context).ids)
        with torch.inference_mode():
            logprobs = torch.log_softmax(self.model(torch.tensor([ids])).logits[0].double(), -1)[start - 1 : -1]
        own = torch.tensor(ids[start:])
        return float(logprobs.gather(1, own[:, None]).sum()), bool((logprobs.argmax(-1) == own).all())

    def greedy(self, prompt: str) -> str:
        ids = torch.tensor([self.tokenizer.encode(prompt).ids])
        with torch.inference_mode():
            made = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        return str(self.tokenizer.decode(made[0, ids.shape[1] :].tolist()))


@pytest.mark.parametrize("tokenized", [True, False], ids=["ids", "text"])
def test_lm_eval_scores_and_generates_what_transformers_does(
    peer: Client, url: str, policy: Path, tmp_path: Path, did: Did, tokenized: bool
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    for name, text in (("local_choice", CHOICE), ("local_until", UNTIL)):
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\ndoc_to_text: '{{{{question}}}}'\n{common}{text}")
    found = peer("lm_eval_local", url, str(policy), str(tmp_path), tokenized, timeout_s=240)
    scores, texts = found["local_choice"], found["local_until"]
    did(
        f"lm-evaluation-harness {found['version']}, prompts as {'ids' if tokenized else 'text'}",
        f"{sum(map(len, scores))} log-likelihoods, {len(texts)} generations, equal to transformers'",
    )
    alone = Independent(policy)
    for question, answers, made in zip(QUESTIONS, scores, texts, strict=True):
        context = str(question["question"])
        for choice, ((logprob, greedy),) in zip(question["choices"], answers, strict=True):  # type: ignore[call-overload]
            expected, is_greedy = alone.score(context, f" {choice}")
            assert (logprob, greedy) == (pytest.approx(expected, abs=1e-3), is_greedy)
        assert made == [[alone.greedy(context).split("e")[0]]]


def test_openai_completes_chats_and_streams(peer: Client, url: str, policy: Path, did: Did) -> None:
    prompt = "where is müller?"
    found = peer("openai_policy", url, prompt)
    did(
        f"openai {found['version']} models, completions, chat, streams",
        "3 answers equal, whole and streamed, 1 refusal",
    )
    alone = Independent(policy)
    made = alone.greedy(prompt)
    assert found["model"] == found["retrieved"] == policy.name
    assert found["completion"] == prompt + made and found["streamed"] == made
    assert found["logprobs"][0] is None and all(value <= 0 for value in found["logprobs"][1:])
    assert found["usage"]["total_tokens"] == found["streamed_usage"] == len(found["logprobs"])
    chat = alone.greedy(f"<|user|>{prompt}<|assistant|>")
    assert found["chat"] == [chat, chat] and found["chat_streamed"] == chat and found["chat_logprobs"] > 0
    assert "unknown" in found["refused"]


def call(url: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        url, data=None if body is None else json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def test_sglangs_router_spreads_generations_over_two_engines(policy: Path, tmp_path: Path, did: Did) -> None:
    python = os.environ.get("FORAY_PEERS_PYTHON")
    assert python, "run `make test-peers`: FORAY_PEERS_PYTHON names the interpreter that has the clients"
    with engine(policy, tmp_path / "a") as first, engine(policy, tmp_path / "b") as second:
        port, metrics = free_port("127.0.0.1"), free_port("127.0.0.1")
        address, log = f"http://127.0.0.1:{port}", tmp_path / "router"
        argv = [python, "-m", "sglang_router.launch_router", "--worker-urls", first, second]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
        argv += ["--policy", "round_robin"]
        with process(argv, log) as router:

            def both() -> bool:
                with contextlib.suppress(OSError, ValueError):
                    return len([w for w in call(f"{address}/workers")["workers"] if w["is_healthy"]]) == 2
                return False

            until(both, router, log)
            ids = call(f"{first}/tokenize", {"prompt": "where is müller?"})["tokens"]
            body = {"input_ids": ids, "sampling_params": GREEDY, "return_logprob": True}
            answers = [call(f"{address}/generate", body) for _ in range(6)]
            prompt = {"model": policy.name, "temperature": 0, "max_tokens": 12}
            text = call(f"{address}/v1/completions", {**prompt, "prompt": "where is müller?"})
            messages = [{"role": "user", "content": "where is müller?"}]
            chat = call(f"{address}/v1/chat/completions", {**prompt, "messages": messages})
            direct = call(f"{first}/generate", body)
            counts = [requests_of(url) for url in (first, second)]
    did(
        "sglang-router 0.3.2 over two engines",
        f"6 generations, a completion and a chat: {counts[0]} and {counts[1]} requests",
    )
    assert {tuple(answer["output_ids"]) for answer in answers} == {tuple(direct["output_ids"])}
    assert text["choices"][0]["text"] == direct["text"] and chat["choices"][0]["message"]["content"]
    assert all(answer["meta_info"]["weight_version"] == "default" for answer in answers)
    assert min(counts) >= 3


def requests_of(url: str) -> int:
    """Requests that the engine has ended."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    return int(
        float(next(line.split()[-1] for line in page.splitlines() if line.startswith("sglang:num_requests_total")))
    )
