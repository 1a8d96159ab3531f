"""skyrl-gym's SearchToolGroup: URL, JSON list of queries, topk -> JSON list of what the policy would read."""

import json
import sys

from skyrl_gym.tools.search import SearchToolGroup

url, queries, topk = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
group = SearchToolGroup(search_url=f"{url}/retrieve", topk=topk, log_requests=False)
print(json.dumps([json.loads(group.search(query))["result"] for query in queries]))
