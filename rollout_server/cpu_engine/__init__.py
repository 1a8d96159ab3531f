"""An inference engine for small models on CPUs, embedded so that the whole ring runs without a GPU.

It speaks the part of SGLang's HTTP API that Foray uses, so that everything outside this package treats both engines
alike. `server/app.py` draws how the parts hang together. Where it differs from SGLang 0.5.21-0.5.23:

* `/health` answers at once while paused (SGLang: 503 after 20 s); `/health_generate` is 503 at once then.
* A weight update is verified whole (names, shapes, finite numbers, architecture) before any tensor is touched.
  SGLang takes unknown names silently and dies of a wrong shape.
* An update by broadcast (gloo) fills a second set of weights while generation goes on. Weights, label and prefix cache
  change at `/end_weight_update`, all at once, when paused or when nothing runs (SGLang: with each bucket, generation
  stopped). A session with a missing tensor or a failed bucket ends with 400 and the old weights (SGLang: 200,
  half-loaded); one in which nothing was sent ends with 200. A trainer that does not come or stops sending costs
  `--update-timeout-s`, then 400. A group can be destroyed in the middle of a bucket.
* `in_place` + `flush_cache=true` is 400 before any weight changes (SGLang: after). Version spans after an `in_place`
  update begin at the right token (SGLang: one late).
* A request that arrives during a pause can be aborted (SGLang: runs after the pause). An abort of a waiting request
  returns all of its tokens.
* `weight_versions` is in every answer and stream chunk (SGLang: in the last one).
* LoRA adapters need no flag; an unloaded one goes on for requests that use it already (SGLang: the answer waits).
* A stream shows no text that may be cut off as a stop string and never holds a token back for it (SGLang: the chunk).
* `sampling_seed` always holds. Non-finite output ends one request with status 500. No request ends the process.
* The prefix cache is dropped at every weight update, with or without `flush_cache`. `/flush_cache` does not wait.
* `/v1/completions` and `/v1/chat/completions` refuse unknown fields and unknown models (SGLang: ignores, answers), and
  `max_tokens: 0` scores a prompt (SGLang: 400). What is pickled is refused (`server/absent.py`).
* Listening beyond loopback needs an API key; keys come from environment variables only.
"""
