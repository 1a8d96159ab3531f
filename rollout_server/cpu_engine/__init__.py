"""CPU inference engine for small models on CPUs, so that the whole ring runs without a GPU.

Implements the part of SGLang's HTTP API that Foray uses, so the rest of Foray treats both engines alike. The module
docstring of `server/app.py` shows its structure. Differences from SGLang 0.5.23:

* `/health` answers at once while paused (SGLang: 503 after 20 s); `/health_generate` is 503 at once then.
* A weight update is fully verified (names, shapes, finite numbers, architecture) before any tensor is changed.
  SGLang ignores unknown names and crashes on a wrong shape.
* An update by broadcast (gloo) fills a second set of weights while generation continues. Weights, label and prefix
  cache are switched together at `/end_weight_update`, when paused or when no request runs (SGLang: with each bucket,
  generation stopped). A session with a missing tensor or a failed bucket ends with 400 and the old weights (SGLang:
  200, partly loaded); an empty session ends with 200. If the trainer does not join or stops sending, the call fails
  with 400 after `--update-timeout-s`. A group can be destroyed in the middle of a bucket.
* `in_place` + `flush_cache=true` is 400 before any weight changes (SGLang: after). Version spans after an `in_place`
  update start at the right token (SGLang: one late).
* A request that arrives during a pause can be aborted (SGLang: runs after the pause). An abort of a waiting request
  returns all of its tokens.
* `weight_versions` is in every answer and stream chunk (SGLang: in the last one).
* LoRA adapters need no flag. Requests that use an unloaded adapter continue with it (SGLang: the answer waits).
* A stream holds back text that may become a stop string, but never tokens (SGLang: the whole chunk).
* `sampling_seed` is always respected. Non-finite output ends one request with status 500. No request can end the
  process.
* A prompt is computed in parts of at most 1,024 tokens, and fewer for large models (`scheduler.WAVE_PRODUCTS`; SGLang:
  `--chunked-prefill-size`). `num_computed_tokens` in `/v1/loads` counts them.
* The prefix cache is cleared at every weight update, with or without `flush_cache`. `/flush_cache` does not wait.
* `/v1/completions` and `/v1/chat/completions` reject unknown fields and unknown models (SGLang: ignores them), and
  `max_tokens: 0` scores a prompt (SGLang: 400). Pickled data is rejected (`ABSENT` in `server/admin.py`).
* Listening on a non-loopback address requires an API key. Keys come from environment variables only.
"""
