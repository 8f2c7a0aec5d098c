"""transformers as a server, one request at a time: ``python transformers_server.py MODEL --port PORT``.

A script of its own, so that it runs in any Python that has torch and transformers. It answers ``GET /health`` and
``POST /v1/completions`` with server-sent events as OpenAI's protocol has them: one for each token or, with a draft, for
each block that was accepted.
"""

from __future__ import annotations

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Model:
    """A causal language model that writes one text at a time."""

    def __init__(self, folder: Path, dtype: str, threads: int, draft: Path | None, num_draft_tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        self._torch = torch
        self._lock = threading.Lock()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self._options: dict[str, Any] = {}
        if draft is not None:
            assistant = AutoModelForCausalLM.from_pretrained(draft, dtype=getattr(torch, dtype)).eval()
            assistant.generation_config.num_assistant_tokens = num_draft_tokens
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            self._options = {"assistant_model": assistant}

    def write(self, asked: dict[str, Any], tell: Any) -> None:
        """Generate; ``tell(text, tokens, prompt_tokens)`` is called for each token."""
        torch = self._torch
        options: dict[str, Any] = {"do_sample": False, **self._options}
        if asked.get("temperature"):
            options |= {"do_sample": True, "temperature": asked["temperature"], "top_k": 0}
        if asked.get("ignore_eos"):
            options["min_new_tokens"] = asked["max_tokens"]
        with self._lock, torch.inference_mode():
            torch.manual_seed(asked.get("seed", 0))
            ids = self._tokenizer(asked["prompt"], return_tensors="pt").input_ids
            streamer = _Each(self._tokenizer, ids.shape[1], tell)
            self._model.generate(ids, max_new_tokens=asked["max_tokens"], streamer=streamer, **options)


class _Each:
    """transformers' streamer: first the prompt, then each token."""

    def __init__(self, tokenizer: Any, prompt_tokens: int, tell: Any) -> None:
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self._tell = tell
        self._count = -1

    def put(self, value: Any) -> None:
        tokens = value.reshape(-1)
        if self._count < 0:
            self._count = 0
        else:
            self._count += len(tokens)
            self._tell(self._tokenizer.decode(tokens), self._count, self._prompt_tokens)

    def end(self) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    """Answers for ``model``."""

    model: Model

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self.model.write(asked, self._tell)
        except (ValueError, RuntimeError) as error:  # of transformers and torch; the client is told
            self._send(json.dumps({"error": str(error)[:300]}))
        self._send("[DONE]")

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _tell(self, text: str, tokens: int, prompt_tokens: int) -> None:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
        self._send(json.dumps({"choices": [{"text": text, "finish_reason": None}], "usage": usage}))

    def _send(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draft", type=Path, default=None)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    Handler.model = Model(args.model, args.dtype, args.threads, args.draft, args.num_draft_tokens)
    ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
