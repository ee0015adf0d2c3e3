"""examples/server.py: under load, with clients that leave, with a full pool, with wrong input."""

import http.client
import importlib.util
import json
import sys
import threading
import time

import pytest
import torch
from book.layout import ROOT

from linattn_edu.models import Config, LanguageModel

spec = importlib.util.spec_from_file_location("server", ROOT / "examples" / "server.py")
serving = importlib.util.module_from_spec(spec)
spec.loader.exec_module(serving)

EVERY = 64


def model(impl="reference"):
    """With weights so large that its tokens vary."""
    torch.manual_seed(0)
    made = LanguageModel(Config(("gdn", "kda"), 256, 32, 2, 8, 16, 48), impl)
    with torch.no_grad():
        for block in made.blocks:
            block.mixer.o_proj.weight.mul_(8)
        made.embedding.weight.mul_(10)
    return made.eval()


@pytest.fixture(scope="module")
def whole():
    """In float64, where no two logits are so near that the size of a batch would change a token."""
    return model().double()


def alone(model, prompt, n):
    """The tokens of generate."""
    given = torch.tensor([prompt], device=model.embedding.weight.device)
    return model.generate(given, n)[0, len(prompt) :].tolist()


def prompts(count, seed=0):
    """Prompts of 1 to 200 tokens; half of them begin alike, and have parts twice."""
    draw = torch.Generator().manual_seed(seed)
    common = torch.randint(256, (150,), generator=draw).tolist()
    for i in range(count):
        own = torch.randint(256, (int(torch.randint(1, 60, (), generator=draw)),), generator=draw)
        own = own.tolist()
        yield common + own if i % 2 else own + own[: len(own) // 2]


@pytest.fixture
def serve(whole):
    """A server on a free port: serve(**options of the engine) -> its engine and its port."""
    servers = []

    def started(served=whole, **options):
        server = serving.Server(("127.0.0.1", 0), serving.Handler)
        server.engine = engine = serving.Engine(served, **{"every": EVERY} | options)
        servers.append(server)
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return engine, servers[-1].server_port

    yield started
    for server in servers:
        server.shutdown()
        server.server_close()


def post(port, body, path="/generate", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = body if isinstance(body, bytes) else json.dumps(body)
    connection.request("POST", path, body, headers)
    return connection, connection.getresponse()


def ask(port, body, leave=None):
    """Status, tokens and last line; after `leave` lines the client goes, and the last is None."""
    connection, response = post(port, body)
    tokens, line = [], None
    lines = (json.loads(line) for line in response if line.strip())
    for n, line in enumerate(lines):
        tokens += line.get("tokens", [])
        if n == leave and response.status == 200:
            line = None
            break
    response.close()
    connection.close()
    return response.status, tokens, line


def settled(port, slots):
    """/health when all slots are free again."""
    for _ in range(200):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/health")
        health = json.load(connection.getresponse())
        if health["free"] == slots and not health["waiting"]:
            return health
        time.sleep(0.05)
    raise AssertionError(health)


WRONG = [
    (b"{", "Expecting property name"),
    (b"[" * 100000, "recursion" if sys.version_info < (3, 14) else "Stack overflow"),
    (b"\xff", "can't decode"),
    ([], "the body must be an object of prompt and max_tokens"),
    ({"prompt": "a", "top_k": 1}, "the body must be an object of prompt and max_tokens"),
    ({"max_tokens": 1}, "the body must be an object of prompt and max_tokens"),
    ({"prompt": []}, "prompt must be integers from 0 to 255, or a string where tokens are bytes"),
    ({"prompt": ""}, "and not empty"),
    ({"prompt": [256]}, "prompt must be integers from 0 to 255"),
    ({"prompt": [True]}, "prompt must be integers from 0 to 255"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens must be an integer from 1 to 4096, got 0"),
    ({"prompt": "a", "max_tokens": "9"}, "max_tokens must be an integer from 1 to 4096, got '9'"),
]


def test_wrong_input(serve):
    """400 with the reason, and nothing has happened."""
    _, port = serve(slots=1)
    for body, reason in WRONG:
        connection, response = post(port, body)
        assert response.status == 400 and reason in json.load(response)["error"], body
        connection.close()
    for length in ("1048577", "-1", "many"):
        connection, response = post(port, b"", **{"Content-Length": length})
        said = json.load(response)["error"]
        assert (response.status, said) == (400, "Content-Length must be from 0 to 2^20")
        connection.close()
    connection, response = post(port, {}, "/other")
    assert response.status == 404 and json.load(response)["error"].startswith(
        "there is GET /health"
    )
    assert set(settled(port, 1).values()) == {0, 1}


def test_a_full_pool(whole, serve):
    """One slot, one place to wait: the third is refused, and the second's turn comes when the first
    has gone; a client that goes while it waits leaves its place.
    """
    engine, port = serve(slots=1, waiting=1)
    long, short = {"prompt": [1, 2, 3], "max_tokens": 4096}, {"prompt": "abc", "max_tokens": 3}
    first, answer = post(port, long)
    assert json.loads(answer.readline())["tokens"]
    second, _ = post(port, long)
    assert ask(port, short)[::2] == (
        503, {"error": "all 1 slots are taken, 1 requests wait: try again"}
    )  # fmt: skip
    for connection in (second, first):
        connection.sock and connection.sock.close()
        connection.close()
    answer.close()
    for _ in range(100):
        status, tokens, line = ask(port, short)
        if status == 200:
            break
        time.sleep(0.1)
    assert tokens == alone(whole, list(b"abc"), 3)
    assert line == {"done": True, "text": bytes(tokens).decode(errors="replace")}
    assert settled(port, 1)["cancelled"] == 2 and engine.health()["finished"] == 1


def test_a_fault_of_the_server_is_told(whole, serve, monkeypatch):
    """And the next request is served."""
    engine, port = serve(slots=2)
    body = {"prompt": [5, 6], "max_tokens": 4}
    with monkeypatch.context() as patched:
        patched.setattr(engine.pool, "step", lambda *_: 1 / 0)
        assert ask(port, body)[2] == {"error": "ZeroDivisionError: division by zero"}
    assert ask(port, body)[1] == alone(whole, [5, 6], 4)
    health = settled(port, 2)
    assert (health["failed"], health["finished"]) == (1, 1)


@pytest.mark.long
def test_prefixes_and_guesses_change_no_token(whole, serve):
    """Prompts that end at a checkpoint, before and behind it, with a cache of two prefixes; and
    without a guess.
    """
    prompt = (next(prompts(1, seed=1)) * 200)[:200]
    for options in ({"prefixes": 2}, {"guesses": 0}):
        engine, port = serve(**options)
        for n in (EVERY, EVERY + 1, 2 * EVERY - 1, 2 * EVERY, 1, EVERY + 7, 2 * EVERY + 9):
            tokens = ask(port, {"prompt": prompt[:n], "max_tokens": 20})[1]
            assert tokens == alone(whole, prompt[:n], 20)
        health = settled(port, 8)
        assert health["reused"] == EVERY * (0 + 1 + 1 + 1 + 0 + 1 + 2)
        assert (health["guessed"] > 0) == ("prefixes" in options)
    assert len(engine.prefixes) == 2


@pytest.mark.long
def test_the_kernels(serve, device):
    """Side by side, in float32: compiled on a GPU, else in the interpreter."""
    served = model("triton").to(device)
    _, port = serve(served, slots=2)
    bodies = [{"prompt": [7, 8, 9] * n, "max_tokens": 6} for n in (30, 22)]
    got = [None, None, None]

    def client(i):
        got[i] = ask(port, bodies[i % 2])[1]

    clients = [threading.Thread(target=client, args=(i,)) for i in range(3)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(120)
    assert got == [alone(served, bodies[i % 2]["prompt"], 6) for i in range(3)]
    assert settled(port, 2)["reused"] > 0


def test_models_that_are_not_served():
    mamba = LanguageModel(Config(("gdn", "mamba2"), 256, 32, 2, 8, 16, 48), impl="reference")
    with pytest.raises(
        ValueError, match=r"the model must be of gdn and kda, got \('gdn', 'mamba2'"
    ):
        serving.Engine(mamba)


def test_the_command(whole, tmp_path, monkeypatch, capsys):
    """A checkpoint of the command train is served."""
    run = serving.train.Run(
        serving.train.Settings(layers=1, width=16, length=8), b"a" * 200, torch.device("cpu")
    )
    torch.save(run.state(), tmp_path / "checkpoint.pt")
    said = []

    def once(server):
        threading.Thread(target=server.handle_request).start()
        said.append(ask(server.server_port, {"prompt": "ab", "max_tokens": 5}))

    monkeypatch.setattr(serving.Server, "serve_forever", once)
    arguments = ["server.py", str(tmp_path / "checkpoint.pt"), "--device", "cpu", "--port", "0"]
    monkeypatch.setattr("sys.argv", arguments)
    serving.main()
    assert said[0][1] == alone(run.model, list(b"ab"), 5)
    assert "8 slots" in capsys.readouterr().out


@pytest.mark.long
def test_64_clients(whole, serve):
    """All at once, 8 slots, 24 may wait; every third leaves after some lines; who is refused comes
    again. What is finished has the tokens of generate.
    """
    _, port = serve(slots=8, waiting=24)
    bodies = [
        {"prompt": prompt, "max_tokens": 8 + i * 5 % 17 if i % 3 else 300}
        for i, prompt in enumerate(prompts(64))
    ]
    refused, answers = [], [None] * 64
    gate = threading.Barrier(64)

    def client(i):
        gate.wait()
        while True:
            status, tokens, line = ask(port, bodies[i], leave=i % 4 if i % 3 == 0 else None)
            if status != 503:
                answers[i] = status, tokens, line
                return
            refused.append(line)
            time.sleep(0.1)

    clients = [threading.Thread(target=client, args=(i,)) for i in range(64)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(120)
        assert not thread.is_alive()
    left = 0
    for i, (status, tokens, line) in enumerate(answers):
        assert status == 200
        assert tokens == alone(whole, bodies[i]["prompt"], len(tokens))
        assert line is None or (line["done"], len(tokens)) == (True, bodies[i]["max_tokens"])
        left += line is None
    health = settled(port, 8)
    assert left == 22
    assert health["finished"] + health["cancelled"] == 64 and health["failed"] == 0
    assert health["cancelled"] > 11
    assert health["refused"] == len(refused) > 0
    said = {"error": "all 8 slots are taken, 24 requests wait: try again"}
    assert all(line == said for line in refused)
    assert health["reused"] > 0 and 0 < health["right"] < health["guessed"]
    assert len({t for _, tokens, _ in answers for t in tokens}) > 50
