from lit_grpo.cli.errors import one_sentence


def test_of_all_types_that_were_tried_those_that_say_something_remain() -> None:
    message = """Parser key "model.generator":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'Generator'>, <class 'NoneType'>]
  Errors:
    - Problem with given class_path 'nope.Nope':
        No module named 'nope'
    - Expected a <class 'NoneType'>
  Given value type: <class 'str'>
  Given value: nope.Nope"""
    assert one_sentence(message) == (
        "Parser key \"model.generator\": Problem with given class_path 'nope.Nope': No module named 'nope'"
    )


def test_plain_sentence_stays() -> None:
    assert one_sentence("num_slots must be at least 1, not 0.\n") == "num_slots must be at least 1, not 0."
