"""Helpers that several test files use. A test file imports no other test file."""

from tests.helpers.comparison import END, SAMPLING, assert_same_tokens, plain_and_speculative
from tests.helpers.models import ARCHITECTURES, VOCAB, fresh_model, perturbed_copy, prompts, shared_draft, tiny_model
from tests.helpers.oracle import Oracle
from tests.helpers.processors import PrefixReader, RecordingStreamer, RowWisePrefixReader, StatefulReader
