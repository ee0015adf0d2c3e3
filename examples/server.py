"""A minimal server of a trained model: a pool of states, a cache of prefixes, guessed tokens.

    python -m linattn_edu train --out runs/gdn
    python examples/server.py runs/gdn/checkpoint.pt
    curl -N 127.0.0.1:8000/generate -d '{"prompt": "The for statement ", "max_tokens": 100}'

Every sequence has a slot of a pool: for each layer a state, a ring of what was written since, and
the last inputs of its convolutions. One thread takes a waiting prompt into a free slot, then a step
of all that have one, and so on. A prompt leaves its states every so many tokens for those that
begin like it. A step checks guesses: what followed the same two tokens before. Wrong ones are
dropped from the ring; the state never saw them. Decoding is greedy: a request gets the tokens of
``model.generate``, whatever else is served. Chapters 26, 26b and 27.
"""

import argparse
import json
import queue
import threading
from collections import OrderedDict, deque
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import torch

from linattn_edu import causal_conv1d_update, make_ring, train
from linattn_edu.layers import GatedDeltaNet, KimiDeltaAttention
from linattn_edu.models import LanguageModel


class Pool:
    """A model and the states of as many sequences as there are slots."""

    def __init__(self, model, slots, guesses, every):
        self.model, self.every, self.layers = model, every, []
        self.device = model.embedding.weight.device
        for layer in (block.mixer for block in model.blocks):
            if not isinstance(layer, (GatedDeltaNet, KimiDeltaAttention)):
                raise ValueError(f"the model must be of gdn and kda, got {model.config.mixers}")
            cache, dtype = layer.make_cache(slots), layer.q_proj.weight.dtype
            kind = {"channels": isinstance(layer, KimiDeltaAttention), "tokens": 1 + guesses}
            ring = make_ring(cache.recurrent_state, layer.num_heads, dtype=dtype, **kind)
            convs = [x.new_zeros(*x.shape[:2], x.shape[2] + guesses) for x in cache.conv_states]
            self.layers.append(SimpleNamespace(state=cache.recurrent_state, ring=ring, convs=convs))

    def _predict(self, tokens, convolve, rule, last=0):
        """The likeliest tokens after these; convolve, rule: the parts of a layer with a memory."""
        x = self.model.embedding(torch.tensor(tokens, device=self.device))
        for block, own in zip(self.model.blocks, self.layers, strict=True):
            layer, h, qkv = block.mixer, block.mixer.projected(block.mixer_norm(x)), []
            heads = layer.num_heads, layer.num_heads, layer.num_v_heads
            for j, name in enumerate("qkv"):
                y = h(f"{name}_proj")
                y = convolve(own, j, getattr(layer, f"{name}_conv1d"), y)
                qkv.append(y.unflatten(-1, (heads[j], -1)))
            given = dict(zip("qkv", qkv, strict=True)) | layer._gates(h) | {"impl": layer.impl}
            o = rule(own, layer, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, **given)
            x = x + layer.o_proj(layer._norm(o, h).flatten(-2))
            x = x if block.mlp is None else x + block.mlp(block.mlp_norm(x))
        return self.model.embedding(self.model.norm(x[:, -last:]), out=True).argmax(-1).tolist()

    @torch.no_grad()
    def prefill(self, slot, prompt, start, saved):
        """The token after a prompt whose first `start` ones are in `saved`; checkpoints behind."""
        nothing = [(0, [x.new_zeros(x.shape[1], 1) for x in own.convs]) for own in self.layers]
        for own, before in zip(self.layers, saved or nothing, strict=True):
            own.before, own.inputs = before, []
        made = [[] for _ in range((len(prompt) - start) // self.every)]

        def convolve(own, j, conv, y):
            W, pool = conv.kernel_size[0], own.convs[j]
            before = own.before[1][j].expand(-1, W)
            own.inputs.append(torch.cat([before, y[0].mT], -1))  # column W is token `start`
            columns = torch.arange(len(prompt) - W, len(prompt)) % pool.shape[2]
            pool[slot][:, columns.to(self.device)] = own.inputs[j][:, -W:]
            return conv(y, cache=before[None].clone())[0]

        def rule(own, layer, **given):
            own.state[slot], own.ring.counts[slot] = own.before[0], 0
            o, _, states = layer._rule(
                False, **given, initial_state=own.state, inplace_final_state=True,
                ssm_state_indices=torch.tensor([slot], device=self.device),
                checkpoint_every_n_tokens=self.every,
            )  # fmt: skip
            for n, checkpoint in enumerate(made, 1):
                ends = [y[:, n * self.every :][:, : layer.conv_size].clone() for y in own.inputs]
                checkpoint.append((states[0, n - 1], ends))
            return o

        return self._predict([prompt[start:]], convolve, rule, 1)[0][0], made

    @torch.no_grad()
    def step(self, rows, numbers):
        """The tokens after each of these; numbers: slots, lengths before, accepted last time."""
        slots, lengths, accepted = torch.tensor(numbers, dtype=torch.int32, device=self.device)

        def convolve(own, j, conv, y):
            given = own.convs[j], conv.weight.squeeze(1), conv.bias, conv.activation, lengths, slots
            return causal_conv1d_update(y.mT, *given, impl=conv.impl).mT

        def rule(own, layer, **given):
            where = {"ssm_state_indices": slots, "num_accepted_tokens": accepted}
            return layer._replay(**given, state=own.state, ring=own.ring, **where)

        return self._predict(rows, convolve, rule)


class Request:
    """What a body in JSON asks for, what was generated, and lines for the client, None the last."""

    def __init__(self, body, vocabulary):
        given = json.loads(body)
        if not isinstance(given, dict) or not {"prompt"} <= {*given} <= {"prompt", "max_tokens"}:
            raise ValueError("the body must be an object of prompt and max_tokens")
        tokens, limit = given["prompt"], given.get("max_tokens", 64)
        if isinstance(tokens, str) and vocabulary == 256:
            tokens = list(tokens.encode(errors="replace"))
        whole = isinstance(tokens, list) and tokens and all(type(t) is int for t in tokens)
        if not whole or not 0 <= min(tokens) <= max(tokens) < vocabulary:
            wanted = f"integers from 0 to {vocabulary - 1}, or a string where tokens are bytes"
            raise ValueError(f"prompt must be {wanted}, and not empty")
        if type(limit) is not int or not 1 <= limit <= 4096:
            raise ValueError(f"max_tokens must be an integer from 1 to 4096, got {limit!r}")
        self.prompt, self.tokens, self.end = len(tokens), tokens, len(tokens) + limit
        self.lines, self.cancelled, self.slot, self.accepted = queue.SimpleQueue(), False, None, 0

    def guess(self, most, n=2):
        """What followed the last n tokens where they stood last, one less than there is room."""
        tokens, most = self.tokens, min(most, self.end - len(self.tokens) - 1)
        for i in range(len(tokens) - n - 1, -1, -1):
            if tokens[i : i + n] == tokens[-n:]:
                return tokens[i + n : i + n + most]
        return []


class Engine:
    """Takes requests from a bounded queue through the pool, in a thread of its own."""

    def __init__(self, model, slots=8, waiting=32, guesses=4, every=64, prefixes=256):
        self.pool, self.guesses, self.every = Pool(model, slots, guesses, every), guesses, every
        self.vocabulary, self.slots, self.bound = model.config.vocabulary, slots, waiting
        self.free, self.active, self.waiting = list(range(slots)), [], deque()
        self.prefixes, self.most = OrderedDict(), prefixes  # first tokens -> a checkpoint
        names = "finished cancelled refused failed reused guessed right"
        self.counts = dict.fromkeys(names.split(), 0)
        self.changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request):
        with self.changed:
            if len(self.waiting) >= self.bound + len(self.free):
                self.counts["refused"] += 1
                raise queue.Full(f"all {self.slots} slots are taken, {self.bound} requests wait")
            self.waiting.append(request)
            self.changed.notify()

    def cancel(self, request):
        with self.changed:
            request.cancelled = True  # its slot is free before the next step
            if request in self.waiting:
                self.waiting.remove(request)
                self.counts["cancelled"] += 1

    def health(self):
        with self.changed:
            return {"free": len(self.free), "waiting": len(self.waiting)} | self.counts

    def _run(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.active)
                for request in [r for r in self.active if r.cancelled]:
                    self._leave(request, "cancelled")
                new = self.waiting.popleft() if self.waiting and self.free else None
                if new:
                    new.slot = self.free.pop()
                    self.active.append(new)
            try:
                if new:
                    self._prefill(new)
                if self.active:
                    self._step(list(self.active))
            except Exception as error:  # a fault of the server, of which its clients hear
                with self.changed:
                    for request in list(self.active):
                        self._leave(request, "failed", error=f"{type(error).__name__}: {error}")

    def _leave(self, request, how, **line):
        """Give the slot back; self.changed is held."""
        self.active.remove(request)
        self.free.append(request.slot)
        self.counts[how] += 1
        request.lines.put(line)
        request.lines.put(None)

    def _grown(self, request, new):
        """Tokens that are right; with the last of them the request is done."""
        request.tokens += new
        request.lines.put({"tokens": new})
        if len(request.tokens) == request.end:
            said = request.tokens[request.prompt :]
            line = {"text": bytes(said).decode(errors="replace")} if self.vocabulary == 256 else {}
            with self.changed:
                self._leave(request, "finished", done=True, **line)

    def _prefill(self, request):
        prompt, saved = tuple(request.tokens), None
        for start in range((len(prompt) - 1) // self.every * self.every, -1, -self.every):
            if saved := self.prefixes.get(prompt[:start]):
                self.prefixes.move_to_end(prompt[:start])
                break
        token, made = self.pool.prefill(request.slot, prompt, start, saved)
        for n, checkpoint in enumerate(made, 1):
            self.prefixes[prompt[: start + n * self.every]] = checkpoint
        while len(self.prefixes) > self.most:
            self.prefixes.popitem(last=False)  # the one that is out of use longest
        self.counts["reused"] += start
        self._grown(request, [token])

    def _step(self, requests):
        """A token of every sequence, and those of its guesses that turn out right."""
        rows = [[r.tokens[-1], *r.guess(self.guesses)] for r in requests]
        padded = [row + [0] * (max(map(len, rows)) - len(row)) for row in rows]
        numbers = [(r.slot, len(r.tokens) - 1, r.accepted) for r in requests]
        found = self.pool.step(padded, [*zip(*numbers, strict=True)])
        for r, row, after in zip(requests, rows, found, strict=True):
            r.accepted = 1
            while r.accepted < len(row) and row[r.accepted] == after[r.accepted - 1]:
                r.accepted += 1
            self.counts["guessed"] += len(row) - 1
            self.counts["right"] += r.accepted - 1
            self._grown(r, after[: r.accepted])


class Handler(BaseHTTPRequestHandler):
    """POST /generate, lines of JSON, and GET /health, of self.server.engine."""

    timeout = 60  # seconds for a client that neither sends nor reads
    log_message = lambda *_: None

    def _answer(self, status, *lines):
        self.send_response(status)
        self.send_header("Content-Type", "application/x-ndjson")
        self.end_headers()
        self.wfile.writelines(json.dumps(line).encode() + b"\n" for line in lines)

    def do_GET(self):
        if self.path != "/health":
            return self._answer(404, {"error": "there is GET /health and POST /generate"})
        self._answer(200, self.server.engine.health())

    def do_POST(self):
        engine, length = self.server.engine, self.headers.get("Content-Length", "")
        if self.path != "/generate":
            return self.do_GET()
        try:
            if not length.isdigit() or int(length) > 1 << 20:
                raise ValueError("Content-Length must be from 0 to 2^20")
            request = Request(self.rfile.read(int(length)), engine.vocabulary)
            engine.submit(request)
        except (ValueError, RecursionError) as error:
            return self._answer(400, {"error": str(error)})
        except queue.Full as error:
            return self._answer(503, {"error": f"{error}: try again"})
        try:
            self._answer(200)
            line = {}
            while line is not None:
                line = {}
                with suppress(queue.Empty):  # an empty line shows whether somebody is there
                    line = request.lines.get(timeout=0.2)
                self.wfile.write((json.dumps(line) if line else "").encode() + b"\n")
        except OSError:  # nobody is
            engine.cancel(request)


class Server(ThreadingHTTPServer):
    request_queue_size, engine = 256, None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="of python -m linattn_edu train")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, n in (("port", 8000), ("slots", 8), ("waiting", 32), ("guesses", 4), ("every", 64)):
        parser.add_argument(f"--{name}", type=int, default=n)
    args = parser.parse_args()
    state, impl = train.read(args.checkpoint), "reference" if args.device == "cpu" else "auto"
    model = LanguageModel(train.Settings(**state["settings"]).config(), impl)
    model.to(args.device).load_state_dict(state["model"])
    with Server(("127.0.0.1", args.port), Handler) as server:
        server.engine = Engine(model, args.slots, args.waiting, args.guesses, args.every)
        print(f"http://127.0.0.1:{args.port}, {args.slots} slots", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
