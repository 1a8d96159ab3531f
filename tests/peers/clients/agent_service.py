"""A service that stays up and runs agents of several libraries: an answer to one POST for each trajectory.

    agent_service.py [NODE-COMMAND ..]

The question's id names the client and its arguments: `agent_openai chat stream 1`; `agent_node` is passed on to the
service that NODE-COMMAND starts. Prints the port.
"""

import importlib
import json
import signal
import subprocess
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PLAYERS = {
    name: importlib.import_module(name) for name in ("agent_langgraph", "agent_openai", "agent_sdk", "agent_smolagents")
}
node = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True) if sys.argv[1:] else None
NODE = f"http://127.0.0.1:{int(node.stdout.readline())}/" if node else ""


class Handler(BaseHTTPRequestHandler):
    """Play with the client that the question names."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        task = json.loads(body)
        name, *arguments, _ = task["id"].split()
        if name == "agent_node":
            answer = urllib.request.urlopen(urllib.request.Request(NODE, body)).read()
        else:
            played = PLAYERS[name].play(task["question"], task["base_url"], task["api_key"], *arguments)
            answer = json.dumps({"answer": played}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)


signal.signal(signal.SIGTERM, lambda *_: sys.exit())
ThreadingHTTPServer.request_queue_size = 128
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
try:
    server.serve_forever()
finally:
    if node:
        node.terminate()
