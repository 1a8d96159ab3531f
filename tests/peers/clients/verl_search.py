"""verl's search tool: URL, JSON list of queries, topk -> JSON [text that the policy would read, status, hits].

Its module runs as it is in the wheel, without `verl/__init__.py`, which asks for torch and ray.
"""

import importlib
import json
import sys
import types
from importlib.metadata import distribution

package = types.ModuleType("verl")
package.__path__ = [str(distribution("verl").locate_file("verl"))]
sys.modules["verl"] = package
module = importlib.import_module("verl.tools.utils.search_r1_like_utils")

url, queries, topk = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
text, metadata = module.perform_single_search_batch(f"{url}/retrieve", queries, topk, timeout=20)
print(json.dumps([json.loads(text)["result"], metadata["status"], metadata["total_results"]]))
