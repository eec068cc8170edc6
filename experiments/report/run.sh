#!/bin/sh
# Two runs of 18-18 layers that differ in how depth is handled, and their report; see README.md.
# Usage: experiments/report/run.sh STORE FOLDER   (STORE: made by `ziggurat prepare multi30k-de-en`)
set -e
store=$1 folder=$2
train() {
  name=$1
  shift
  ziggurat train multi30k-de-en --run "$folder/$name" data.store="$store" \
    model.preset=tiny model.d_model=128 model.d_ff=512 model.heads=4 model.encoder.layers=18 model.decoder.layers=18 \
    "model.dropout={residual: 0.1, attention: 0.0, activation: 0.1, embedding: 0.1}" \
    training.batch.max_tokens=512 training.schedule.peak=1e-3 training.schedule.warmup_updates=75 \
    training.clip_norm=null training.log_every_updates=10 training.checkpoint.every_updates=100 \
    training.checkpoint.keep_last=1 training.stop.updates=300 training.threads=1 training.tensorboard=false \
    "training.validation={every_updates: 100, decode: true, metric: loss, max_sentences: 60}" \
    "training.diagnostics={every_updates: 25, max_share: 0.3}" "$@"
}
train admin model.residual=admin model.init.kind=admin \
  "training.optimiser={kind: radam, betas: [0.9, 0.98], epsilon: 1e-8, rectified_only: true}"
train post-norm model.residual=post "training.optimiser={kind: adam, betas: [0.9, 0.98], epsilon: 1e-8}"
ziggurat report "$folder/post-norm" "$folder/admin" --out "$folder/report.html" --translations 60
