"""Commands of Python, each in a fork of one process that has loaded torch, which takes seconds."""

import atexit
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVER = """
import contextlib, json, os, runpy, signal, sys, tempfile, traceback, types
import torch

def run(args, env, cwd):
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:0] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    kind, what, *more = args
    sys.argv = [kind, *more]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)

def end_of(args, env, cwd):
    try:
        run(args, env, cwd)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return 1 if isinstance(end.code, str) else int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if not (child := os.fork()):
            os.setpgid(0, 0)
            signal.alarm(300)
            for file, at in ((open(os.devnull), 0), (out, 1), (err, 2)):
                os.dup2(file.fileno(), at)
            code = end_of(*json.loads(line))
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)  # leaving torch takes half a second
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it started and left
        said = [(file.seek(0), file.read())[1] for file in (out, err)]
    print(json.dumps([code, *said]), flush=True)
"""
_servers = []


def python(*args: str, env: dict[str, str], cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """Run ("-c", code) or ("-m", module), and arguments, with this environment and in this folder;
    torch is loaded, and whether hashes are random is that of one process for all.
    """
    if not _servers:
        own = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        _servers.append(subprocess.Popen([sys.executable, "-c", SERVER], env=own, **pipes))
        atexit.register(_servers[0].kill)
    server = _servers[0]
    server.stdin.write(json.dumps([args, env, str(cwd)]) + "\n")
    server.stdin.flush()
    return subprocess.CompletedProcess(args, *json.loads(server.stdout.readline()))
