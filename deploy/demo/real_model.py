"""Make a small policy for real questions, without a model hub, in a few minutes on one core.

The model answers poorly; it only makes a whole run over real questions and passages possible on a laptop. It has a
byte-level BPE tokenizer trained on the corpus and a short supervised warm start on Search-R1's protocol: it writes
well-formed turns and searches for words of the question. For useful results set `run.model` to a real model.

    python -m deploy.demo.real_model --config runs/hotpotqa/resolved.yaml [--steps 400]
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.demo.warmstart import lay_copying
from learner.config.questions import question_sources

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from deploy.config import RunConfig
    from rollout_server.environment.environment import Environment

VOCABULARY = 4096
THETA = 1e6
BATCH = 8
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 30
SHOW_EVERY = 20
DRILLED = 4
DRILLS_PER_LESSON = 4
"""One in this many batches has whole episodes, the others are drills."""
OBSERVATION_TOKENS = 96
PRACTICE_SHARE = 0.5
"""Share of demonstrations made from the corpus alone: there are thousands of titles but only hundreds of questions."""

NAME = re.compile(r"(?:[A-Z0-9][\w'.\-]*)(?: (?:of|the|and|de|von|van|in)? ?[A-Z0-9][\w'.\-]*)*")


@dataclass(frozen=True)
class Lesson:
    """A demonstration: question, query, passages, answer."""

    question: str
    query: str
    passages: tuple[dict[str, str], ...]
    answer: str


def salient(question: str, titles: Sequence[str] = ()) -> str:
    """Return the query: a supporting title that the question names, else its longest run of capitalised words."""
    named = [title for title in titles if title.lower() in question.lower()]
    if named:
        return max(named, key=len)
    # the first word is always capitalised
    rest = question.split(" ", 1)[-1]
    return max(NAME.findall(rest), key=len, default=rest.rstrip("? "))


def lessons(questions: Sequence[dict[str, Any]], corpus: dict[str, dict[str, str]], seed: int) -> Iterator[Lesson]:
    """Yield demonstrations without end, half from questions with their gold passages, half from the corpus alone."""
    rng = random.Random(seed)
    everything = list(corpus.values())
    while True:
        if rng.random() < PRACTICE_SHARE:
            passage = rng.choice(everything)
            title = passage["contents"].partition("\n")[0].strip('"')
            format_question = rng.choice(
                ("What is {}?", "Who or what is {}?", "Where does the name {} come from?", "{}?")
            )
            yield Lesson(format_question.format(title), title, (passage,), title)
            continue
        record = rng.choice(questions)
        gold = tuple(corpus[i] for i in record.get("supporting_ids", ()) if i in corpus)
        answers = record.get("golden_answers") or record.get("answers") or [""]
        query = salient(record["question"], record.get("sup_titles", ()))
        yield Lesson(record["question"], query, gold[:1] or (rng.choice(everything),), answers[0])


def train_tokenizer(texts: Iterator[str], directory: Path) -> None:
    """Train a byte-level BPE of VOCABULARY tokens, in Hugging Face layout; the protocol's tags are plain text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": None})
    )


def new_model(seed: int, context: int) -> Qwen2ForCausalLM:
    """Return a Qwen2 of 1.4 million parameters, a third of them embeddings, initialised to copy (`lay_copying`)."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=320,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config).float()
    lay_copying(model, THETA)
    return model


def turn(query: str) -> str:
    """Return the policy's turn that searches for `query`."""
    return f"<think> I should look for {query}. </think>\n<search> {query} </search>"


def drill(environment: Environment, stream: Iterator[Lesson]) -> tuple[list[int], list[float]]:
    """Return DRILLED questions, each with the turn that searches: practice in copying, without the long prompt."""
    ids: list[int] = []
    weights: list[float] = []
    for lesson in (next(stream) for _ in range(DRILLED)):
        for text, weight in ((f"Question: {lesson.question}\n", 0.0), (turn(lesson.query), 1.0)):
            part = environment.tokenizer.encode_trusted(text)
            ids += part
            weights += [weight] * len(part)
    return ids, weights


def encode(environment: Environment, lesson: Lesson) -> tuple[list[int], list[float]]:
    """Return (ids, loss weight of each token), made with the code that runs the episodes."""
    from protocol.search import Passage

    own = environment.tokenizer.encode_trusted
    found = [Passage(id=p["id"], contents=p["contents"]) for p in lesson.passages]
    parts = [
        (environment.prompt(lesson.question), 0.0),
        (own(turn(lesson.query)), 1.0),
        (environment.observation(found, OBSERVATION_TOKENS), 0.0),
        (own(f"<think> I found something. </think>\n<answer> {lesson.answer} </answer>"), 1.0),
    ]
    return [i for ids, _ in parts for i in ids], [weight for ids, weight in parts for _ in ids]


def warm_start(
    model: Qwen2ForCausalLM, environment: Environment, stream: Iterator[Lesson], steps: int, say: Callable[[str], None]
) -> None:
    """Train for `steps` supervised steps; after a short warm-up the learning rate decays linearly."""
    import torch

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    for step in range(steps):
        drilled = step % DRILLS_PER_LESSON > 0
        rows = [drill(environment, stream) if drilled else encode(environment, next(stream)) for _ in range(BATCH)]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in rows])
        weights = torch.tensor([row + [0.0] * (width - len(row)) for _, row in rows])[:, 1:]
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * max(0.05, 1.0 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = weights > 0  # computing the other logits would take most of the time
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), ids[:, 1:][wanted])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % SHOW_EVERY == SHOW_EVERY - 1:
            say(f"warm start: step {step + 1} of {steps}, loss {loss.item():.2f}")


def prepare(config: RunConfig, steps: int, say: Callable[[str], None]) -> None:
    """Write tokenizer and warm-started model to `run.model`. The directory appears when it is complete."""
    import torch

    from learner.engine.accelerator import without_gpu
    from rollout_server.environment.environment import build_environment

    without_gpu()
    torch.set_num_threads(1)
    target = config.run.model
    building = target.with_name(target.name + ".building")
    with config.retriever.corpus.open(encoding="utf-8") as lines:
        corpus = {record["id"]: record for record in map(json.loads, lines)}
    (source,) = question_sources(config.learner.questions)
    questions = [json.loads(line) for line in source.path.read_text(encoding="utf-8").splitlines() if line]
    say(f"{len(corpus)} passages, {len(questions)} questions")
    texts = (p["contents"] for p in list(corpus.values())[::4])
    train_tokenizer(texts, building)
    model = new_model(config.run.seed, config.rollout.episode.max_context)
    model.save_pretrained(building)
    environment = build_environment(config.rollout.episode, building)
    warm_start(model, environment, lessons(questions, corpus, config.run.seed), steps, say)
    model.save_pretrained(building)
    building.rename(target)
    say(f"wrote {target}")


def main() -> None:
    """Run the command line: see the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m deploy.demo.real_model", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="configuration of the run")
    parser.add_argument("--steps", type=int, default=400, help="steps of the warm start (default: 400)")
    options = parser.parse_args()
    from deploy.config import load_config

    prepare(load_config(options.config), options.steps, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
