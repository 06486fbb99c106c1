//! The verdict: recomputed times and the recounted form against the prediction's.

use std::collections::BTreeMap;

use crate::compose::{Part, Receipt};
use crate::replay::{Metric, Quantile};
use crate::timing::RowId;

use super::auditor::Auditor;
use super::fault::{AuditReport, Check, SUM_REL, TIE_REL, close};
use super::moment::{Lot, Sum};
use super::sources::Known;

impl Auditor<'_> {
    pub(super) fn compare(&mut self) -> AuditReport {
        let log = &self.prediction.log;
        let mut ttft = Vec::new();
        let mut tpot = Vec::new();
        for index in 0..self.requests.len() {
            let progress = self.requests[index].clone();
            let record = log.requests[index];
            if (record.rank, record.iteration) != (progress.rank, progress.iteration) {
                let what = format!(
                    "request {index} is logged in iteration {} of rank {}, recounted {} of {}",
                    record.iteration, record.rank, progress.iteration, progress.rank
                );
                self.fault(Check::Decisions, what);
            }
            let (Some(post), Some(first), Some(last)) =
                (progress.post, progress.first, progress.last)
            else {
                self.fault(Check::Times, format!("request {index} is never answered"));
                continue;
            };
            // Clock values are sums over all steps before; their rounding is theirs, not the
            // request's.
            let clock = TIE_REL * last.ms.abs();
            let ttft_ms = first.ms - post.ms;
            if (ttft_ms - record.ttft_ms()).abs() > SUM_REL * ttft_ms.abs() + clock {
                let what = format!(
                    "request {index} has a TTFT of {} ms, recomputed {ttft_ms} ms",
                    record.ttft_ms()
                );
                self.fault(Check::Times, what);
            }
            ttft.push(ttft_ms);
            if record.output > 1 {
                let tpot_ms = (last.ms - first.ms) / f64::from(record.output - 1);
                let logged = record.tpot_ms().unwrap_or(f64::NAN);
                let apart = (tpot_ms - logged).abs();
                if apart.is_nan() || apart > SUM_REL * tpot_ms.abs() + clock {
                    let what = format!(
                        "request {index} has a TPOT of {logged} ms, recomputed {tpot_ms} ms"
                    );
                    self.fault(Check::Times, what);
                }
                tpot.push(tpot_ms);
            }
        }
        let prediction = self.prediction;
        let queues = std::mem::take(&mut self.queues);
        let service = std::mem::take(&mut self.service);
        let steps = std::mem::take(&mut self.tpot);
        let mut ttft_form = self.form(&service);
        for (part, sum) in queues {
            for ((_, known), times) in self.form(&sum) {
                *ttft_form.entry((part, known)).or_default() += times;
            }
        }
        let tpot_form = self.form(&steps);
        let ttft_mean_ms = self.totals("TTFT", &ttft, &prediction.ttft, &prediction.ttft_receipt);
        let tpot_mean_ms = self.totals("TPOT", &tpot, &prediction.tpot, &prediction.tpot_receipt);
        let mut lines = 0;
        let mut tied_lines = 0;
        for (name, form, receipt, mean_ms) in [
            ("TTFT", ttft_form, &prediction.ttft_receipt, ttft_mean_ms),
            ("TPOT", tpot_form, &prediction.tpot_receipt, tpot_mean_ms),
        ] {
            let (confirmed, tied) = self.receipt(name, &form, receipt, mean_ms);
            lines += confirmed;
            tied_lines += tied;
        }
        AuditReport {
            ttft_mean_ms,
            tpot_mean_ms,
            iterations: log.iterations.len(),
            lookups: self.lookups,
            lines,
            tied_lines,
        }
    }

    /// A sum by rows, its bundles taken apart.
    fn form(&self, sum: &Sum) -> BTreeMap<(Part, Known), f64> {
        let mut sums = sum.0.clone();
        sums.resize(self.lots.len(), 0.0);
        let mut form = BTreeMap::new();
        // What a bundle holds was known before it.
        for (slot, lot) in self.lots.iter().enumerate().rev() {
            let times = sums[slot];
            match lot {
                Lot::Row(part, known) => {
                    *form.entry((*part, *known)).or_insert(0.0) += times;
                }
                Lot::Bundle(of) => {
                    for (inner, one) in of {
                        sums[*inner] += times * one;
                    }
                }
            }
        }
        form
    }

    /// Holds mean, percentiles and the receipt's sums to the recomputed times; returns the mean.
    fn totals(&mut self, name: &str, times: &[f64], metric: &Metric, receipt: &Receipt) -> f64 {
        let mean_ms = times.iter().sum::<f64>() / times.len().max(1) as f64;
        let parts_ms: f64 = receipt.parts_ms.iter().sum();
        let rows_ms: f64 = receipt
            .lines
            .iter()
            .map(|line| line.coefficient * self.prediction.rows.ms(line.row))
            .sum();
        for (what, ms) in [
            ("mean", metric.mean_ms),
            ("receipt's parts", parts_ms),
            ("receipt's rows", rows_ms),
        ] {
            if !close(ms, mean_ms, SUM_REL) {
                let what = format!("the {what} of {name}: {ms} ms, recomputed {mean_ms} ms");
                self.fault(Check::Totals, what);
            }
        }
        let mut sorted = times.to_vec();
        sorted.sort_by(f64::total_cmp);
        for (percent, quantile) in [(50, metric.p50), (90, metric.p90), (99, metric.p99)] {
            let Quantile { ms, request } = quantile;
            let at = (sorted.len() * percent).div_ceil(100).max(1) - 1;
            let recomputed = sorted.get(at).copied().unwrap_or(f64::NAN);
            let record = self.prediction.log.requests.get(request as usize);
            let cited = record.and_then(|record| match name {
                "TTFT" => Some(record.ttft_ms()),
                _ => record.tpot_ms(),
            });
            if !close(ms, recomputed, SUM_REL) || cited != Some(ms) {
                let what = format!(
                    "p{percent} of {name}: {ms} ms of request {request} ({cited:?}), recomputed \
                     {recomputed} ms"
                );
                self.fault(Check::Totals, what);
            }
        }
        mean_ms
    }

    /// Holds a receipt to the recounted form; returns how many lines agree and how many are ties.
    ///
    /// Coefficients are counts times weights: they agree to 1e-9 relative, or absolute below one.
    /// A line whose difference moves the mean by no more than 1e-12 of itself is rounding: a
    /// roofline's coefficient is bytes, 1e9 and more, and what two paths cancel of it is not zero.
    fn receipt(
        &mut self,
        name: &str,
        form: &BTreeMap<(Part, Known), f64>,
        receipt: &Receipt,
        mean_ms: f64,
    ) -> (usize, usize) {
        let mut pairs: BTreeMap<(Part, Known), (f64, f64)> = BTreeMap::new();
        for (key, times) in form {
            pairs.entry(*key).or_default().0 = *times;
        }
        for line in &receipt.lines {
            let RowId(id) = line.row;
            let Some(known) = self.sources.of_id.get(id as usize) else {
                self.fault(
                    Check::Receipt,
                    format!("{name} names row {id}, of which there is none"),
                );
                continue;
            };
            pairs.entry((line.part, *known)).or_default().1 += line.coefficient;
        }
        let mut agree = 0;
        let mut apart = Vec::new();
        let mut apart_ms = 0.0;
        let mut part_ms: BTreeMap<Part, f64> = BTreeMap::new();
        for ((part, known), (mine, theirs)) in &pairs {
            let row_ms = self.sources.ms[*known];
            *part_ms.entry(*part).or_default() += mine * row_ms;
            let difference = theirs - mine;
            let rounding = SUM_REL * mine.abs().max(1.0);
            if difference.abs() <= rounding || (difference * row_ms).abs() <= TIE_REL * mean_ms {
                agree += usize::from(*mine != 0.0 || *theirs != 0.0);
            } else {
                apart_ms += difference * row_ms;
                apart.push(format!(
                    "{name} has {theirs} x {} in {}, recounted {mine}",
                    self.name(*known),
                    part.name()
                ));
            }
        }
        // Two equally long paths explain a difference only where this clock saw such a pair.
        if !apart.is_empty() && self.ties > 0 && apart_ms.abs() <= TIE_REL * mean_ms {
            return (agree, apart.len());
        }
        for what in apart {
            self.fault(Check::Receipt, what);
        }
        for (index, ms) in receipt.parts_ms.iter().enumerate() {
            let recounted = part_ms.get(&Part::ALL[index]).copied().unwrap_or(0.0);
            if (ms - recounted).abs() > SUM_REL * mean_ms.abs() {
                let what = format!(
                    "{name} has {ms} ms of {}, recounted {recounted} ms",
                    Part::ALL[index].name()
                );
                self.fault(Check::Receipt, what);
            }
        }
        (agree, 0)
    }
}
