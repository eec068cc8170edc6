"""compare-mt's figures for outputs, as JSON; run with the Python of an environment that has compare-mt 0.2.10.

`python theirs.py REFERENCE TRAINING_TEXT ANSWER OUTPUT...`: text files with words separated by blanks.
"""

from __future__ import annotations

import json
import sys

from compare_mt import bucketers, corpus_utils, ngram_utils, scorers, stat_utils


def main(reference_path: str, training_path: str, answer_path: str, *output_paths: str) -> None:
    reference = corpus_utils.load_tokens(reference_path)
    outputs = [corpus_utils.load_tokens(path) for path in output_paths]
    answer = {
        "accuracy-by-frequency": word_accuracy(reference, outputs, training_path),
        "bleu-by-length": bleu_by_length(reference, outputs),
        "length-difference": length_differences(reference, outputs),
        "ngrams": ngrams(reference, outputs),
    }
    with open(answer_path, "w", encoding="utf-8") as file:
        json.dump(answer, file)


def word_accuracy(reference, outputs, training_path):
    """Return, by output and bucket, the words of the reference and the F-measure."""
    bucketer = bucketers.create_word_bucketer_from_profile("freq", freq_corpus_file=training_path)
    statistics, *_ = bucketer.calc_statistics(reference, outputs)
    return [
        {
            label: [int(in_reference), float(f_measure)]
            for label, (_, in_reference, in_output, _, _, f_measure) in zip(
                bucketer.bucket_strs, of_output, strict=True
            )
            if in_reference or in_output
        }
        for of_output in statistics
    ]


def bleu_by_length(reference, outputs):
    """Return, by output and bucket, the sentences and BLEU from 0 to 100."""
    bucketer = bucketers.create_sentence_bucketer_from_profile("length")
    scorer = scorers.create_scorer_from_profile("bleu")
    found = []
    for output in outputs:
        parts = zip(bucketer.bucket_strs, bucketer.create_bucketed_corpus(output, reference), strict=True)
        found.append({label: [len(o), float(scorer.score_corpus(r, o)[0])] for label, (o, r, _) in parts if o})
    return found


def length_differences(reference, outputs):
    """Return, by output and bucket, the sentences."""
    bucketer = bucketers.create_sentence_bucketer_from_profile("lengthdiff")
    found = []
    for output in outputs:
        parts = zip(bucketer.bucket_strs, bucketer.create_bucketed_corpus(output, reference), strict=True)
        found.append({label: len(o) for label, (o, _, _) in parts if o})
    return found


def ngrams(reference, outputs):
    """Return, for the first output and each other one, matches in both and score of every n-gram that differs."""
    matched = [ngram_utils.compare_ngrams(reference, output)[1] for output in outputs]
    found = []
    for other in matched[1:]:
        scores = stat_utils.extract_salient_features(dict_of(matched[0]), dict_of(other))
        differ = [ngram for ngram in scores if matched[0][ngram] != other[ngram]]
        found.append({" ".join(n): [matched[0][n], other[n], scores[n]] for n in differ})
    return found


def dict_of(counts):
    """Return a copy, because extract_salient_features adds to its argument."""
    return counts.copy()


if __name__ == "__main__":
    main(*sys.argv[1:])
