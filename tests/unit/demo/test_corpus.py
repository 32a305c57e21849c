"""What the demo models are trained on."""

from serving.demo import corpus


def test_held_out_modules_exist_and_are_not_trained_on() -> None:
    root = corpus.library_root()
    held_out = {root / name for name in corpus.HELD_OUT}
    assert all(path.is_file() for path in held_out)
    assert not held_out & set(corpus.training_files())


def test_a_documented_function_becomes_a_conversation() -> None:
    source = 'def twice(x):\n    """Return x doubled.\n\n    More.\n    """\n    return 2 * x\n'
    [(question, answer)] = corpus.chat_turns(source)
    assert question == "Write a Python function twice: Return x doubled."
    assert answer == f"```python\n{source.rstrip()}\n```"


def test_the_order_of_documents_depends_on_the_seed_alone() -> None:
    first = corpus.training_documents(seed=1)
    assert first == corpus.training_documents(seed=1)
    assert first != corpus.training_documents(seed=2)
