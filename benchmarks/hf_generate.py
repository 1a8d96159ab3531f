"""The baseline of the engine benchmark: `generate` of transformers, one static batch per round.

`python -m benchmarks.hf_generate MODEL THREADS DTYPE`. Reads {"prompts", "new_tokens"} per line, answers a line of
figures.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def main(argv: Sequence[str]) -> None:
    """Serve until the input ends."""
    torch.set_num_threads(int(argv[1]))
    model = AutoModelForCausalLM.from_pretrained(argv[0], dtype=getattr(torch, argv[2])).eval()
    for line in sys.stdin:
        asked = json.loads(line)
        ids = torch.tensor(asked["prompts"])
        # no end of sequence: every row has the requested length
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=asked["new_tokens"], eos_token_id=None, pad_token_id=0
        )
        begun, cpu = time.monotonic(), time.process_time()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
        tokens = ids.shape[0] * (out.shape[1] - ids.shape[1])
        assert tokens == ids.shape[0] * asked["new_tokens"]
        print(json.dumps({"tokens_per_s": tokens / seconds, "cpu_ms_per_token": 1000 * cpu / tokens}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
