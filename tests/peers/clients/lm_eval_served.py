"""lm-evaluation-harness against `foray serve`: URL, token, name, folder of tasks -> JSON of its results."""

import json
import os
import sys

os.environ |= {"HF_HOME": f"{sys.argv[4]}/cache", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": sys.argv[2]}

import lm_eval
from lm_eval.tasks import TaskManager

url, _, name, folder = sys.argv[1:]
arguments = {
    **{"base_url": f"{url}/chat/completions", "model": name, "num_concurrent": 4, "max_retries": 1},
    **{"tokenized_requests": False, "tokenizer_backend": None},
}
found = lm_eval.simple_evaluate(
    "local-chat-completions",
    model_args=arguments,
    tasks=["served_until"],
    task_manager=TaskManager(include_path=folder),
    apply_chat_template=True,
    bootstrap_iters=0,
)
print(
    json.dumps(
        {
            "version": lm_eval.__version__,
            "resps": [sample["resps"] for sample in found["samples"]["served_until"]],
            "score": found["results"]["served_until"]["exact_match,none"],
        }
    )
)
