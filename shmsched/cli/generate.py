"""``shmsched generate``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from shmsched.cli.options import SECONDS, Number, socket_option
from shmsched.cli.printable import printable


@click.command("generate")
@click.argument("prompt")
@socket_option
@click.option("--model", metavar="NAME", help="Which model, if the daemon serves several.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), metavar="N", default=128, show_default=True)
@click.option(
    "--temperature",
    type=Number(min=0, max=100),
    metavar="T",
    default=0.7,
    show_default=True,
    help="0 takes the likeliest token; small models then soon repeat themselves.",
)
@click.option("--top-p", type=Number(min=0, min_open=True, max=1), metavar="P", default=0.9, show_default=True)
@click.option(
    "--top-k", type=click.IntRange(min=0, max=2**31 - 1), metavar="K", default=64, show_default=True, help="0: off."
)
@click.option("--seed", type=click.IntRange(min=0, max=2**64 - 1), metavar="N", help="The same seed, the same text.")
@click.option(
    "--wait", type=SECONDS, metavar="S", default=0.0, help="How long to wait for a daemon that is still starting."
)
@click.option("--raw-prompt", is_flag=True, help="Leave out the token for the beginning of a text before the prompt.")
def command(
    prompt: str,
    socket: Path | None,
    model: str | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    wait: float,
    raw_prompt: bool,
) -> None:
    """Continue PROMPT with the daemon's model, printing the text as it comes.

    PROMPT is text to go on with, not a question to answer: it gets the token for the beginning of a text in front and
    nothing else. That suits a base model, as the demo's Gemma 3 270M is ("The capital of France is"). No chat template
    is applied.

    Ends at a stop token of the model, after --max-new-tokens, or when the session is full. Exit status 3: no daemon answers, or
    the socket's path is wrong.
    """
    from shmsched.client import Client
    from shmsched.client.generation import FinishReason
    from shmsched.params import SamplingParams

    sampling = SamplingParams(temperature, top_p, top_k, seed)
    show = printable if sys.stdout.isatty() else str
    with Client(socket=socket, wait=wait) as client, client.open_session(model=model) as session:
        tokens = session.model.tokens_of(prompt, bos=not raw_prompt)
        generation = session.generate(tokens, max_new_tokens=max_new_tokens, sampling=sampling)
        generation.nothing_follows()
        try:
            for text in generation.increments():
                print(show(text), end="", flush=True)
        finally:
            if generation.tokens:
                print(flush=True)
        full = session.position == session.model.max_session_tokens
        if generation.finish_reason is FinishReason.LENGTH and full and len(generation.tokens) < max_new_tokens:
            click.echo(f"shmsched: the session is full ({session.model.max_session_tokens} tokens)", err=True)
