"""Plans: decisions as objects, files, tables, web pages and traces.

`ShardingPlan` and `Frontier` as data: `sharding_plan.py`, `frontier.py`, `plan_data.py` (files, schema-checked and with
a checksum). What a plan spends: `expenses.py`; where the backward half has its tensors from: `backward_half.py`; two
plans: `plan_difference.py`, `alternative.py`; the step: `step_replay.py`. Reports: `*_report.py`, with the charts of
`*_chart.py` and `*_charts.py`.
"""
