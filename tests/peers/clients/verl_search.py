"""verl's search tool: URL, JSON list of lists of queries (all asked at once), topk -> JSON list, one entry a list of
queries: [text that the policy would read, status, hits].

Its module runs as it is in the wheel, without `verl/__init__.py`, which asks for torch and ray.
"""

import importlib
import json
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution

package = types.ModuleType("verl")
package.__path__ = [str(distribution("verl").locate_file("verl"))]
sys.modules["verl"] = package
module = importlib.import_module("verl.tools.utils.search_r1_like_utils")

url, batches, topk = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])


def search(queries):
    text, metadata = module.perform_single_search_batch(f"{url}/retrieve", queries, topk, timeout=30)
    return json.loads(text)["result"], metadata["status"], metadata["total_results"]


with ThreadPoolExecutor(len(batches)) as pool:
    print(json.dumps(list(pool.map(search, batches))))
