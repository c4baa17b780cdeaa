"""`python -m python_backend.server`: one Triton server in the foreground, until Ctrl-C or SIGTERM.

Exit codes: 0 ended as asked, 1 the repository or a model is wrong, 2 usage, 3 this machine lacks something.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from python_backend.errors import BuildError, EnvironmentFault
from python_backend.server.addresses import Addresses
from python_backend.server.launcher import Launcher, Options

_ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
    """Serves until asked to stop; what went wrong is one message on stderr, never a traceback."""
    arguments = _parser().parse_args(argv)
    try:
        return Launcher(_options(arguments), say=_say, ready=_ready).run()
    except BuildError as error:
        _say(f"error: {error}")
        return 1
    except EnvironmentFault as error:
        _say(f"error: {error}")
        return 3
    except KeyboardInterrupt:
        _say("interrupted before the server was started")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m python_backend.server", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model-repository", type=Path, help="a rendered repository, engines/<name>/model_repo")
    what.add_argument(
        "--spec",
        type=Path,
        default=_ROOT / "build_engines" / "specs" / "smollm2-135m.yaml",
        help="a deployment spec, built first if need be (default: %(default)s)",
    )
    parser.add_argument("--engines-dir", type=Path, default=_ROOT / "engines", help="where --spec builds (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(f"--{name}-port", type=_port, default=port, help="0: any free one (default: %(default)s)")
    parser.add_argument("--model", default="ensemble", help="the model that must answer before READY (%(default)s)")
    parser.add_argument("--log-file", type=Path, help="Triton's full log (default: logs/ beside the model repository)")
    parser.add_argument(
        "--exit-timeout",
        type=int,
        default=10,
        metavar="SECONDS",
        help="a stop waits so long for requests (%(default)s)",
    )
    parser.add_argument("--exit-with-parent", action="store_true", help="stop when the process that started this ends")
    return parser


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"a port is 0 to 65535, not {port}")
    return port


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        model_repository=arguments.model_repository,
        spec=arguments.spec,
        engines_dir=arguments.engines_dir,
        addresses=Addresses(arguments.host, arguments.http_port, arguments.grpc_port, arguments.metrics_port),
        model=arguments.model,
        log_file=arguments.log_file,
        exit_timeout_s=arguments.exit_timeout,
        exit_with_parent=arguments.exit_with_parent,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _ready(text: str) -> None:
    print(text, flush=True)
