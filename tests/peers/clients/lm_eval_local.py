"""lm-evaluation-harness: URL, model directory, folder of tasks, whether prompts go as token ids -> JSON {task: [what
each answer came to, as the harness keeps it]}."""

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_HOME": f"{sys.argv[3]}/cache", "HF_HUB_OFFLINE": "1"}

import lm_eval
from lm_eval.tasks import TaskManager

url, model, folder, tokenized = sys.argv[1], Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
arguments = {
    "base_url": f"{url}/v1/completions",
    "model": model.name,
    "tokenizer": str(model),
    "tokenizer_backend": "huggingface",
    "tokenized_requests": tokenized,
    "max_length": 512,
    "max_retries": 1,
}
tasks = ["local_choice", "local_until"]
found = lm_eval.simple_evaluate(
    "local-completions",
    model_args=arguments,
    tasks=tasks,
    task_manager=TaskManager(include_path=folder),
    bootstrap_iters=0,
)
print(json.dumps({"version": lm_eval.__version__, **{t: [s["resps"] for s in found["samples"][t]] for t in tasks}}))
