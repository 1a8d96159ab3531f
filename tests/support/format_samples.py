"""Records as the sources of each format write them, and what becomes of them."""

from __future__ import annotations

from typing import Any

from learner.data.formats.base import Asked

CONTEXT = [["Ada Lovelace", ["Ada wrote.", " She did."]], ["Paris, Texas", ["A film."]]]
PARAGRAPHS = [
    {"idx": 0, "title": "Ada Lovelace", "paragraph_text": "Ada wrote.", "is_supporting": True},
    {"idx": 1, "title": "Bell", "paragraph_text": "Bell rang.", "is_supporting": False},
]
SEARCH_R1 = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "Answer the given question. .. Question: who wrote it?\n"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Ada", "A. L."]}},
    "extra_info": {"split": "train", "index": 7},
}
WHO, GOLDS = "who wrote it?", ("Ada", "A. L.")
QUESTIONS: dict[str, list[tuple[dict[str, Any], Asked]]] = {
    "search_r1": [
        (SEARCH_R1, Asked("nq/train-7", WHO, GOLDS, "nq", {"split": "train"})),
        # the columns of the FlashRAG data set that the script mapped
        (
            SEARCH_R1 | {"id": "train_7", "question": "who wrote it?", "golden_answers": ["x"]},
            Asked("nq/train_7", WHO, GOLDS, "nq", {"split": "train"}),
        ),
        (
            {"data_source": "m", "prompt": SEARCH_R1["prompt"], "reward_model": {"ground_truth": "Ada"}},
            Asked("", WHO, ("Ada",), "m"),
        ),
    ],
    "simpledeepsearcher": [
        (
            {"Question": WHO, "source": "2wiki", "id": "2wiki_1", "answer": ["Ada", "A. L."]},
            Asked("2wiki_1", WHO, GOLDS, "2wiki"),
        )
    ],
    "2wiki": [
        (
            {
                **{"_id": "w1", "type": "compositional", "question": WHO, "context": CONTEXT, "answer": "Ada"},
                "supporting_facts": [["Ada Lovelace", 0], ["Paris, Texas", 0]],
                "evidences": [["Emma", "author", "Ada"]],
            },
            Asked("w1", WHO, ("Ada",), "", {"type": "compositional"}, ("Ada Lovelace", "Paris, Texas")),
        )
    ],
    "musique": [
        (
            {
                **{"id": "2hop__1_2", "paragraphs": PARAGRAPHS, "question": WHO, "answer": "Ada"},
                "question_decomposition": [{"id": 1}, {"id": 2}],
                **{"answer_aliases": ["A. L."], "answerable": True},
            },
            Asked("2hop__1_2", WHO, GOLDS, "", {"hops": 2}, ("Ada Lovelace",)),
        )
    ],
    "strategyqa": [
        (
            {"qid": "s1", "term": "Ada", "question": WHO, "answer": False, "facts": ["f"], "decomposition": ["d"]},
            Asked("s1", WHO, ("no",)),
        ),
        ({"qid": "s2", "question": WHO, "answer": True}, Asked("s2", WHO, ("yes",))),
    ],
    "hotpotqa": [
        (
            {
                **{"_id": "h1", "question": WHO, "answer": "Ada", "type": "bridge", "level": "easy"},
                **{"supporting_facts": [["Bell", 1], ["Ada Lovelace", 0], ["Bell", 2]], "context": CONTEXT},
            },
            Asked("h1", WHO, ("Ada",), "", {"type": "bridge", "level": "easy"}, ("Bell", "Ada Lovelace")),
        ),
        (
            {
                **{"id": "h2", "question": WHO, "answer": "yes", "type": "comparison", "level": "hard"},
                "supporting_facts": {"title": ["Bell"], "sent_id": [1]},
            },
            Asked("h2", WHO, ("yes",), "", {"type": "comparison", "level": "hard"}, ("Bell",)),
        ),
    ],
    "dpr": [
        (
            {
                **{"dataset": "nq_train_psgs_w100", "question": WHO, "answers": ["Ada", "A. L."]},
                **{"positive_ctxs": [], "negative_ctxs": [], "hard_negative_ctxs": []},
            },
            Asked("", WHO, GOLDS, "nq"),
        ),
        ({"question": WHO, "answers": "['Ada', \"A. L.\"]"}, Asked("", WHO, GOLDS)),
    ],
    "flashrag": [
        (
            {"id": "test_0", "question": WHO, "golden_answers": ["Ada", "A. L."], "metadata": {"a": 1}},
            Asked("test_0", WHO, GOLDS),
        )
    ],
    # the published fields with invented rows: PopQA's TSV, TriviaQA's own files and its copy on the Hugging Face hub,
    # SimpleQA's CSV, FRAMES' TSV
    "popqa": [
        (
            {"id": "77", "subj": "Emma", "prop": "author", "question": WHO, "possible_answers": '["Ada", "A. L."]'},
            Asked("77", WHO, GOLDS),
        )
    ],
    "triviaqa": [
        (
            {
                **{"Question": WHO, "QuestionId": "tc_2", "QuestionSource": "http://example.org/", "SearchResults": []},
                "Answer": {"Aliases": ["Ada", "A. L."], "NormalizedAliases": ["ada"], "Type": "x", "Value": "Ada"},
            },
            Asked("tc_2", WHO, GOLDS),
        ),
        (
            {"question": WHO, "question_id": "tc_3", "answer": {"aliases": ["A. L."], "value": "Ada", "type": "x"}},
            Asked("tc_3", WHO, GOLDS),
        ),
    ],
    "simpleqa": [
        ({"metadata": "{'topic': 'Art'}", "problem": WHO, "answer": "Ada"}, Asked("", WHO, ("Ada",))),
    ],
    "frames": [
        (
            {"": "0", "Prompt": WHO, "Answer": "Ada", "reasoning_types": "Tabular", "wiki_links": "['https://x/Ada']"},
            Asked("", WHO, ("Ada",)),
        ),
    ],
    "foray": [
        (
            {"id": 3, "question": WHO, "answers": ["Ada", " "], "source": "mine", "supporting_ids": ["4", "6"]},
            Asked("3", WHO, ("Ada",), "mine", {}, ("4", "6")),
        )
    ],
    "nq_open": [
        ({"question": WHO, "answer": ["Ada", "A. L."]}, Asked("", WHO, GOLDS)),
        ({"question": WHO, "answer": "Ada"}, Asked("", WHO, ("Ada",))),
    ],
}
CORPORA: dict[str, tuple[dict[str, Any], list[str]]] = {
    "contents": ({"id": "0", "contents": '"Ada"\nAda wrote.'}, ['"Ada"\nAda wrote.']),
    "title_text": ({"id": "0", "title": "Ada", "text": "Ada wrote."}, ['"Ada"\nAda wrote.']),
    # KILT's knowledge source, with an invented page
    "kilt": (
        {"_id": "0", "wikipedia_title": "Ada", "text": ["Ada\n", "Ada wrote.\n", "Section::::Life.\n"], "anchors": []},
        ['"Ada"\nAda wrote.\nSection::::Life.'],
    ),
    "abstracts": ({"id": "0", "title": "Ada", "abstract": "Ada wrote."}, ['"Ada"\nAda wrote.']),
    "hotpotqa": (
        {"_id": "h", "question": WHO, "context": CONTEXT},
        ['"Ada Lovelace"\nAda wrote. She did.', '"Paris, Texas"\nA film.'],
    ),
    "musique": (
        {"id": "m", "question": WHO, "paragraphs": PARAGRAPHS},
        ['"Ada Lovelace"\nAda wrote.', '"Bell"\nBell rang.'],
    ),
}
