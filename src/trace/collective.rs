//! Collectives: which kernels they are, and what each rank brings to one.

use std::collections::BTreeMap;

use serde::Serialize;

use super::event::{GpuEvent, Profile, Span, Work};
use super::spread::Spread;

/// Words in a kernel's name, in lower case, and the collective they speak of; the first that fits.
/// NCCL: `ncclDevKernel_AllReduce_Sum_f32_RING_LL`, `ncclKernel_...` before 2.19. TensorRT-LLM and
/// FlashInfer: `allreduce_fusion_kernel_oneshot_lamport`, `oneShotAllReduceKernel`. vLLM and
/// SGLang: `cross_device_reduce_1stage`.
const KINDS: [(&str, &str); 13] = [
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("cross_device_reduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("reduce_scatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("nccl*broadcast", "broadcast"),
    ("nccl*sendrecv", "send_recv"),
    ("nccl*reduce", "reduce"),
    ("nccl", "other"),
];

/// The collective that a kernel of this name is.
pub fn collective_kind(kernel: &str) -> Option<&'static str> {
    let name = kernel.to_lowercase();
    // `AllReduce` as a template argument or in a file's name is still one.
    KINDS
        .iter()
        .find(|(words, _)| {
            let mut rest = name.as_str();
            words.split('*').all(|word| match rest.find(word) {
                Some(at) => {
                    rest = &rest[at + word.len()..];
                    true
                }
                None => false,
            })
        })
        .map(|(_, kind)| *kind)
}

/// Collective kernels of one kind on one stream of a device, waits included.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CollectiveKernels {
    pub kind: &'static str,
    pub stream: u64,
    pub duration: Spread,
}

/// A device's collective kernels by kind and stream.
pub(super) fn kernels(profile: &Profile, device: u32) -> Vec<CollectiveKernels> {
    let mut durations: BTreeMap<(&'static str, u64), Vec<i64>> = BTreeMap::new();
    for (kind, event) in collectives(profile, device) {
        durations
            .entry((kind, event.stream))
            .or_default()
            .push(event.span.ns());
    }
    durations
        .into_iter()
        .filter_map(|((kind, stream), times_ns)| {
            Some(CollectiveKernels {
                kind,
                stream,
                duration: Spread::of(times_ns)?,
            })
        })
        .collect()
}

fn collectives(profile: &Profile, device: u32) -> impl Iterator<Item = (&'static str, &GpuEvent)> {
    // Names repeat: each is looked at once.
    let mut kinds: BTreeMap<super::NameId, Option<&'static str>> = BTreeMap::new();
    profile
        .gpu
        .iter()
        .filter(move |event| event.device == device && event.work == Work::Kernel)
        .filter_map(move |event| {
            let kind = *kinds
                .entry(event.name)
                .or_insert_with(|| collective_kind(profile.names.text(event.name)));
            Some((kind?, event))
        })
}

/// One rank of a group: a device of a profile.
#[derive(Debug, Clone)]
pub struct Member<'a> {
    pub label: String,
    pub profile: &'a Profile,
    pub device: u32,
}

/// Collectives of several ranks laid over one another.
///
/// The k-th collective of a kind is taken to be the same one on every rank. A collective ends on
/// all ranks at once, so a rank's clock differs from the first rank's by the median difference of
/// their ends. What a rank spends in it is its wait for the last rank and the transfer; the
/// transfer is the shortest duration of all ranks, that of the last to arrive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Alignment {
    pub ranks: Vec<RankInCollectives>,
    /// Matched collectives by kind.
    pub kinds: Vec<MatchedKind>,
    /// Kinds that the ranks ran unequally often, which were not matched, in words.
    pub unmatched: Vec<String>,
}

/// What a rank spends in the matched collectives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RankInCollectives {
    pub rank: String,
    /// What was taken off the rank's clock.
    pub clock_offset_ns: i64,
    /// Largest distance of an end from the first rank's, clocks aligned: how well the ends meet.
    pub misfit_ns: i64,
    /// Arrival behind the first rank to arrive, by the aligned clocks.
    pub lateness: Spread,
    /// Duration less transfer.
    pub wait: Spread,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MatchedKind {
    pub kind: &'static str,
    pub transfer: Spread,
}

/// Lays the collectives of `members` over one another; `None`: fewer than two ranks, or no
/// collective that all of them ran equally often.
pub fn align(members: &[Member<'_>]) -> Option<Alignment> {
    if members.len() < 2 {
        return None;
    }
    let of_rank: Vec<BTreeMap<&'static str, Vec<Span>>> = members.iter().map(spans).collect();
    let mut kinds: Vec<&'static str> = of_rank
        .iter()
        .flat_map(|kinds| kinds.keys().copied())
        .collect();
    kinds.sort_unstable();
    kinds.dedup();
    let count = |rank: usize, kind: &str| of_rank[rank].get(kind).map_or(0, Vec::len);
    let mut unmatched = Vec::new();
    kinds.retain(|kind| {
        let counts: Vec<usize> = (0..members.len()).map(|rank| count(rank, kind)).collect();
        let equal = counts.iter().all(|one| *one == counts[0]);
        if !equal {
            unmatched.push(format!("{kind}: {counts:?} on {} ranks", members.len()));
        }
        equal
    });
    // Per rank, its collectives in one order that all ranks share.
    let matched: Vec<Vec<Span>> = of_rank
        .iter()
        .map(|of_kind| {
            kinds
                .iter()
                .flat_map(|kind| of_kind[kind].iter().copied())
                .collect()
        })
        .collect();
    let collectives = matched.first()?.len();
    if collectives == 0 {
        return (!unmatched.is_empty()).then_some(Alignment {
            ranks: Vec::new(),
            kinds: Vec::new(),
            unmatched,
        });
    }
    let offsets: Vec<i64> = matched
        .iter()
        .map(|rank| {
            median(
                rank.iter()
                    .zip(&matched[0])
                    .map(|(own, first)| own.end_ns - first.end_ns),
            )
        })
        .collect();
    let arrivals = |at: usize| {
        matched
            .iter()
            .zip(&offsets)
            .map(move |(rank, offset)| rank[at].start_ns.saturating_sub(*offset))
    };
    let transfers: Vec<i64> = (0..collectives)
        .map(|at| matched.iter().map(|rank| rank[at].ns()).min().unwrap_or(0))
        .collect();
    let ranks = members
        .iter()
        .zip(&matched)
        .zip(&offsets)
        .filter_map(|((member, rank), offset_ns)| {
            let lateness = (0..collectives).filter_map(|at| {
                let own_ns = rank[at].start_ns.saturating_sub(*offset_ns);
                Some(own_ns.saturating_sub(arrivals(at).min()?))
            });
            let waits = rank
                .iter()
                .zip(&transfers)
                .map(|(own, transfer)| own.ns() - transfer);
            let misfit = rank.iter().zip(&matched[0]).map(|(own, first)| {
                let apart_ns = own.end_ns - first.end_ns;
                apart_ns.saturating_sub(*offset_ns).saturating_abs()
            });
            Some(RankInCollectives {
                rank: member.label.clone(),
                clock_offset_ns: *offset_ns,
                misfit_ns: misfit.max()?,
                lateness: Spread::of(lateness.collect())?,
                wait: Spread::of(waits.collect())?,
            })
        })
        .collect();
    let mut rest = transfers.as_slice();
    let kinds = kinds
        .into_iter()
        .filter_map(|kind| {
            let (own, behind) = rest.split_at(count(0, kind));
            rest = behind;
            Some(MatchedKind {
                kind,
                transfer: Spread::of(own.to_vec())?,
            })
        })
        .collect();
    Some(Alignment {
        ranks,
        kinds,
        unmatched,
    })
}

fn spans(member: &Member<'_>) -> BTreeMap<&'static str, Vec<Span>> {
    let mut spans: BTreeMap<&'static str, Vec<Span>> = BTreeMap::new();
    for (kind, event) in collectives(member.profile, member.device) {
        spans.entry(kind).or_default().push(event.span);
    }
    spans
}

/// The lower median.
fn median(values: impl Iterator<Item = i64>) -> i64 {
    let mut values: Vec<i64> = values.collect();
    values.sort_unstable();
    values
        .get(values.len().saturating_sub(1) / 2)
        .copied()
        .unwrap_or(0)
}
