"""``kvoy generate`` and ``kvoy chat``: text from a running cluster, shown while it is made."""

import json
import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from kvoy.cli.words import complain, router_address, say, show
from kvoy.client import Answer, Client, Options, PromptLike, answer_of, user
from kvoy.core.errors import InvalidRequest, KvoyError
from kvoy.core.generate import ChatMessage, GenerateChunk

Grpc = Annotated[
    str,
    typer.Option(help="host:port of the router; without it the newest cluster on this machine.", envvar="KVOY_GRPC"),
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token; 1 draws as the model says.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens that make up this probability.")]
TopK = Annotated[int | None, typer.Option(help="Draw from this many of the likeliest tokens.")]
Seed = Annotated[int | None, typer.Option(help="The same seed draws the same answer.")]
System = Annotated[str, typer.Option(help="What the model is told before the conversation.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads standard input.")],
    *,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: System = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Show text, ids, usage and timing as JSON at the end.")
    ] = False,
    grpc: Grpc = "",
) -> int:
    """Ask the model once and show the answer as it comes."""
    text = sys.stdin.read() if prompt == "-" else prompt
    options = Options(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ())
    )
    with Client(router_address(grpc)) as client:
        chunks = client.stream(text if raw else user(text, system), **options)
        if as_json:
            show(to_json(answer_of(list(chunks))) + "\n")
        else:
            _show_answer(chunks, [])
    return 0


def chat(
    *,
    system: System = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    grpc: Grpc = "",
) -> int:
    """Talk with the model. Ctrl-C cuts an answer short; /reset begins anew; /quit or Ctrl-D leaves."""
    options = Options(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    opening = [ChatMessage("system", system)] if system else []
    history = list(opening)
    with Client(router_address(grpc)) as client:
        if sys.stdin.isatty():
            say("/reset begins anew, /quit leaves.")
        for line in _lines():
            if line == "/reset":
                history = list(opening)
            else:
                asked = [*history, ChatMessage("user", line)]
                answer = _take_turn(client, asked, options)
                history = [*asked, ChatMessage("assistant", answer)] if answer is not None else history
    return 0


def to_json(answer: Answer) -> str:
    """Everything that is known of an answer, as one line of JSON."""
    known = asdict(answer)
    known["finish_reason"] = known.pop("finish")
    return json.dumps(known, ensure_ascii=False)


def _lines() -> Iterator[str]:
    """What the person types, line by line, until /quit or the end."""
    while True:
        try:
            line = input("you> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        if line:
            yield line


def _take_turn(client: Client, asked: PromptLike, options: Options) -> str | None:
    """Shows the answer, or as much of it as the person wants; None if there is none, and the conversation stays as it
    was."""
    said: list[str] = []
    try:
        _show_answer(client.stream(asked, **options), said)
    except KeyboardInterrupt:
        pass
    except InvalidRequest as error:
        complain(f"{error} (/reset begins anew.)")
        return None
    except KvoyError as error:
        complain(str(error))
        return None
    return "".join(said)


def _show_answer(chunks: Generator[GenerateChunk, None, None], said: list[str]) -> None:
    """Shows the pieces as they come and notes them in ``said``; what follows on the screen begins a line of its own."""
    try:
        with closing(chunks):
            for chunk in chunks:
                said.append(chunk.text)
                show(chunk.text)
    finally:
        if any(said):
            show("\n")
