"""A plugin of pytest: each chapter's kernel is a fork of one process with torch and matplotlib.

Nothing else of what a chapter imports is there before its cells run: neither Triton, which has to
see TRITON_INTERPRET first, nor this package.
"""

import json
import os
import signal
import subprocess
import sys

SERVER = """
import gc, json, os, random, runpy, signal, sys
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as a kernel has it
import ipykernel.kernelapp, matplotlib.pyplot, numpy, torch
gc.collect()
gc.freeze()

def kernel(command, env, cwd):
    os.environ.clear()
    os.environ.update(env, JPY_PARENT_PID=str(os.getppid()))  # when that ends, the kernel does
    os.chdir(cwd)
    for at in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), at)
    numpy.random.seed()
    python, _, module, *sys.argv[1:] = command
    runpy.run_module(module, run_name="__main__", alter_sys=True)

for line in sys.stdin:
    what, *more = json.loads(line)
    if what == "start":
        if not (answer := os.fork()):
            os.setpgid(0, 0)
            code = 1
            try:
                kernel(*more)
                code = 0
            finally:
                os._exit(code)
        os.setpgid(answer, answer)  # a signal to a kernel's group is not to reach this process
    else:
        pid, state = os.waitpid(*more, os.WNOHANG)
        answer = os.waitstatus_to_exitcode(state) if pid else None
    print(json.dumps(answer), flush=True)
"""


class Server:
    """Where kernels are forked; one for each worker of pytest."""

    process = None

    def ask(self, *what):
        if self.process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.process = subprocess.Popen([sys.executable, "-c", SERVER], **pipes)
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()


class Kernel:
    """What jupyter_client asks of a subprocess.Popen."""

    stdin = stdout = stderr = returncode = None

    def __init__(self, server, command, env, cwd):
        self.server, self.pid = server, server.ask("start", command, env, str(cwd or os.getcwd()))

    def poll(self):
        if self.returncode is None:
            self.returncode = self.server.ask("poll", self.pid)
        return self.returncode

    def wait(self):
        return self.poll()  # it is called once poll() has said that the kernel ended

    def send_signal(self, number):
        os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def pytest_configure(config):
    from jupyter_client.provisioning import local_provisioner

    server = Server()
    config.add_cleanup(server.close)

    def launch(command, env=None, cwd=None, **_):
        return Kernel(server, command, dict(os.environ if env is None else env), cwd)

    local_provisioner.launch_kernel = launch
