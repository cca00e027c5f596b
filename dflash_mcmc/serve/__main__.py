"""A server with the interface of OpenAI, whose answers are samples of any sampler.

    python -m dflash_mcmc.serve condition=ps                        the embedded model
    python -m dflash_mcmc.serve condition=ps model=hf model.path=FOLDER serve.port=8001

The key that clients need is the environment variable DFLASH_MCMC_API_KEY. `docs/howto/serve.md` has the fields of requests.
"""

import sys

from dflash_mcmc.config import help
from dflash_mcmc.errors import UserError, note
from dflash_mcmc.process import program
from dflash_mcmc.serve import options as options_of


@program.command
def main(arguments: list[str]) -> None:
    """Runs the command line and exits."""
    if help.is_asked_for(arguments):
        described = f"{__doc__}\nFields of the groups model, draft, sampler, ...: python -m dflash_mcmc --help GROUP"
        print(help.usage_of(described, {"Fields": options_of.ServePlan}))
        return
    options, config = options_of.compose(arguments)
    try:
        from dflash_mcmc.serve.app import Service
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name}: is not installed, and the server needs it; allowed: pip install "
                        "-e '.[serve]'") from error

    with options_of.listening(options.host, options.port) as listener:
        host, port = listener.getsockname()[:2]
        note(f"reading the model {options_of.model_name(config)}")
        service = Service(options, config)
        print(f"serving {service.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
        if options.api_key is None and host not in ("127.0.0.1", "::1"):
            print("note: other machines can reach this server, and it asks for no key", file=sys.stderr)
        service.server().run([listener])


if __name__ == "__main__":
    main()
