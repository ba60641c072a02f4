"""Balancers that others wrote, from the system's packages, in front of servers of one engine or one node each."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import TracebackType

import httpx2
import pytest

from tests.proc.servers import PATIENCE, wait_until
from tests.proc.sockets import free_port

HAPROXY = """
defaults
  mode http
  timeout connect 2s
  timeout client 120s
  timeout server 120s
  balance roundrobin
  option redispatch 1
  retries 5
  retry-on all-retryable-errors
  option http-buffer-request
  option httpchk GET /health
  default-server check inter 200ms observe layer4 error-limit 1 on-error mark-down
frontend front
  bind 127.0.0.1:{port}
  default_backend pods
backend pods
  {pods}
"""
NGINX = """
daemon off;
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream pods {{
    least_conn;
    {pods}
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://pods;
      proxy_http_version 1.1;
      proxy_buffering off;
      proxy_next_upstream error timeout http_502 http_503 non_idempotent;
    }}
  }}
}}
"""
KINDS = ("haproxy", "nginx")


class Balancer:
    """kind: of `KINDS`; ports: where servers are, or will be. A request whose server goes before it has said anything
    is put to another one. Skips where the program isn't installed."""

    def __init__(self, kind: str, ports: list[int], folder: Path) -> None:
        program = shutil.which(kind, path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
        if program is None:
            pytest.skip(f"{kind} is not installed")
        port, config = free_port(), folder / f"{kind}.conf"
        self.url = f"http://127.0.0.1:{port}"
        if kind == "haproxy":
            pods = "\n  ".join(f"server pod{i} 127.0.0.1:{at}" for i, at in enumerate(ports))
            config.write_text(HAPROXY.format(port=port, pods=pods))
            self.command = [program, "-db", "-f", str(config)]
        else:
            pods = "\n    ".join(f"server 127.0.0.1:{at} max_fails=1 fail_timeout=1s;" for at in ports)
            config.write_text(NGINX.format(port=port, pods=pods, folder=folder))
            self.command = [program, "-e", "stderr", "-p", str(folder), "-c", str(config)]

    def healthy(self) -> bool:
        """Does it answer, and a server behind it?"""
        assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
        try:
            return httpx2.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx2.TransportError:
            return False

    def __enter__(self) -> Balancer:
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True)
        wait_until("the balancer answers", self.healthy, PATIENCE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()
