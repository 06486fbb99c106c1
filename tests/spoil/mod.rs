//! Spoils predictions: an offset, a factor, in the times or in the receipts too.

#![allow(dead_code, reason = "each test target uses its own share")]

use stepgate::compose::Receipt;
use stepgate::replay::{Metric, Prediction, RequestRecord};

/// Adds to every TTFT: request times, mean and percentiles.
pub fn with_addend(mut prediction: Prediction, ms: f64) -> Prediction {
    for request in &mut prediction.log.requests {
        request.first_token_ms += ms;
        request.last_token_ms += ms;
    }
    prediction.ttft = ttft_of(&prediction);
    prediction
}

pub fn ttft_of(prediction: &Prediction) -> Metric {
    let times = prediction.log.requests.iter().map(RequestRecord::ttft_ms);
    Metric::of((0..).zip(times).collect()).expect("there are requests")
}

pub fn tpot_of(prediction: &Prediction) -> Metric {
    let times = prediction.log.requests.iter().map(RequestRecord::tpot_ms);
    let streamed = (0..)
        .zip(times)
        .filter_map(|(request, ms)| Some((request, ms?)));
    Metric::of(streamed.collect()).expect("there are requests")
}

/// Multiplies the whole clock: every time of the log, every mean and percentile.
pub fn with_factor(mut prediction: Prediction, factor: f64) -> Prediction {
    for iteration in &mut prediction.log.iterations {
        iteration.start_ms *= factor;
    }
    for request in &mut prediction.log.requests {
        for ms in [
            &mut request.post_ms,
            &mut request.arrival_ms,
            &mut request.scheduled_ms,
            &mut request.first_token_ms,
            &mut request.last_token_ms,
        ] {
            *ms *= factor;
        }
    }
    prediction.ttft = ttft_of(&prediction);
    prediction.tpot = tpot_of(&prediction);
    prediction
}

pub fn scale_receipt(receipt: &mut Receipt, factor: f64) {
    for line in &mut receipt.lines {
        line.coefficient *= factor;
    }
    for ms in &mut receipt.parts_ms {
        *ms *= factor;
    }
}

/// Multiplies every time, every part and every line of the receipts alike.
pub fn with_factor_throughout(prediction: Prediction, factor: f64) -> Prediction {
    let mut spoiled = with_factor(prediction, factor);
    scale_receipt(&mut spoiled.ttft_receipt, factor);
    scale_receipt(&mut spoiled.tpot_receipt, factor);
    spoiled
}
