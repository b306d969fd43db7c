#!/usr/bin/env bash
# From nodes.csv and edges.csv to predictions.csv, by the command line alone.
set -euo pipefail
cd "$(mktemp -d)"

# tables to begin with: a generated graph; every third node loses its label
megagraph data export synthetic --out tables
head -n 2 tables/nodes.csv tables/edges.csv | cut -c 1-80
awk -F, -v OFS=, 'NR > 1 && NR % 3 == 0 { $2 = "" } 1' tables/nodes.csv > nodes.csv

megagraph data import --nodes nodes.csv --edges tables/edges.csv --out graph
megagraph train --dataset graph --batching cluster --sequence-nodes 256 --batch-size 4 --layers 2 --dim 32 \
    --epochs 3 --out run
megagraph predict run --out predictions.csv
head -n 3 predictions.csv
