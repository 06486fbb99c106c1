//! Collectives: which kernels they are, and what each rank brings to one.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::event::{Profile, Span, Work};
use super::launch::Launches;
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
    for (kind, gpu) in collectives(profile, device) {
        let event = &profile.gpu[gpu];
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

/// Kind of each collective of a device, and its place among the profile's GPU work.
fn collectives(profile: &Profile, device: u32) -> impl Iterator<Item = (&'static str, usize)> {
    // Names repeat: each is looked at once.
    let mut kinds: BTreeMap<super::NameId, Option<&'static str>> = BTreeMap::new();
    profile
        .gpu
        .iter()
        .enumerate()
        .filter(move |(_, event)| event.device == device && event.work == Work::Kernel)
        .filter_map(move |(gpu, event)| {
            let kind = *kinds
                .entry(event.name)
                .or_insert_with(|| collective_kind(profile.names.text(event.name)));
            Some((kind?, gpu))
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
/// [`in_common_order`] says which collectives are the same one. A collective ends on
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

/// Lays the collectives of `members` over one another; `None`: fewer than two ranks, or ranks
/// without a collective.
pub fn align(members: &[Member<'_>]) -> Option<Alignment> {
    if members.len() < 2 {
        return None;
    }
    let of_rank: Vec<BTreeMap<&'static str, Vec<Span>>> =
        in_common_order(members, |member, gpu| Some(member.profile.gpu[gpu].span));
    let (kinds, unmatched) = common_kinds(&of_rank);
    if kinds.is_empty() && unmatched.is_empty() {
        return None;
    }
    let (mut transfers_of, mut transfers_ns) = (Vec::new(), Vec::new());
    for kind in &kinds {
        let own: Vec<i64> = (0..of_rank[0][kind].len())
            .filter_map(|at| of_rank.iter().map(|rank| rank[kind][at].ns()).min())
            .collect();
        transfers_ns.extend(&own);
        transfers_of.extend(Spread::of(own).map(|transfer| MatchedKind { kind, transfer }));
    }
    // Per rank, its collectives in one order that all ranks share.
    let matched: Vec<Vec<Span>> = of_rank
        .iter()
        .map(|rank| kinds.iter().flat_map(|kind| rank[kind].clone()).collect())
        .collect();
    Some(Alignment {
        ranks: in_collectives(members, &matched, &transfers_ns),
        kinds: transfers_of,
        unmatched,
    })
}

/// Kinds that all ranks ran equally often, and the others in words.
fn common_kinds(of_rank: &[BTreeMap<&'static str, Vec<Span>>]) -> (Vec<&'static str>, Vec<String>) {
    let all: BTreeSet<&'static str> = of_rank
        .iter()
        .flat_map(|kinds| kinds.keys().copied())
        .collect();
    let (mut common, mut unmatched) = (Vec::new(), Vec::new());
    for kind in all {
        let counts: Vec<usize> = of_rank
            .iter()
            .map(|kinds| kinds.get(kind).map_or(0, Vec::len))
            .collect();
        if counts.iter().all(|count| *count == counts[0]) {
            common.push(kind);
        } else {
            unmatched.push(format!("{kind}: {counts:?} on {} ranks", of_rank.len()));
        }
    }
    (common, unmatched)
}

fn in_collectives(
    members: &[Member<'_>],
    matched: &[Vec<Span>],
    transfers_ns: &[i64],
) -> Vec<RankInCollectives> {
    let reference = &matched[0];
    let offsets: Vec<i64> = matched
        .iter()
        .map(|rank| median(ends_apart(rank, reference)))
        .collect();
    let arrivals: Vec<Vec<i64>> = matched
        .iter()
        .zip(&offsets)
        .map(|(rank, offset_ns)| {
            let on_first_clock = |span: &Span| span.start_ns.saturating_sub(*offset_ns);
            rank.iter().map(on_first_clock).collect()
        })
        .collect();
    let first_arrivals: Vec<i64> = (0..reference.len())
        .filter_map(|at| arrivals.iter().map(|rank| rank[at]).min())
        .collect();
    let less = |from: &i64, what: &i64| from.saturating_sub(*what);
    members
        .iter()
        .zip(matched)
        .zip(offsets.iter().zip(&arrivals))
        .filter_map(|((member, rank), (offset_ns, arrivals))| {
            let lateness = arrivals.iter().zip(&first_arrivals);
            let waits = rank.iter().zip(transfers_ns);
            let misfits = ends_apart(rank, reference);
            Some(RankInCollectives {
                rank: member.label.clone(),
                clock_offset_ns: *offset_ns,
                misfit_ns: misfits
                    .map(|apart_ns| less(&apart_ns, offset_ns).saturating_abs())
                    .max()?,
                lateness: Spread::of(lateness.map(|(own, first)| less(own, first)).collect())?,
                wait: Spread::of(waits.map(|(own, transfer)| own.ns() - transfer).collect())?,
            })
        })
        .collect()
}

/// By how much each collective ends later on `rank`'s clock than on the reference's.
fn ends_apart(rank: &[Span], reference: &[Span]) -> impl Iterator<Item = i64> {
    rank.iter()
        .zip(reference)
        .map(|(own, first)| own.end_ns - first.end_ns)
}

/// Each rank's collectives by kind, in an order in which the k-th of a kind is the same one on
/// every rank. `of` makes of a collective, by its place among the GPU work, what is wanted of it,
/// or leaves it out.
///
/// Ranks submit the collectives of a kind in one order, that of their launch calls. They may start
/// in different ones where two communicators have a stream each. Two threads may even submit in
/// different orders, so where the ranks use streams of the same numbers equally often, each stream
/// is matched by itself.
pub(super) fn in_common_order<T>(
    members: &[Member<'_>],
    of: impl Fn(&Member<'_>, usize) -> Option<T>,
) -> Vec<BTreeMap<&'static str, Vec<T>>> {
    let mut ranks: Vec<_> = (members.iter())
        .map(|member| by_launch(member, |gpu| of(member, gpu)))
        .collect();
    let kinds: BTreeSet<&'static str> = ranks.iter().flat_map(BTreeMap::keys).copied().collect();
    for kind in kinds {
        let streams = |rank: &BTreeMap<&'static str, Vec<Submitted<T>>>| {
            let submitted = rank.get(kind).into_iter().flatten();
            let mut streams: Vec<u64> = submitted.map(|own| own.stream).collect();
            streams.sort_unstable();
            streams
        };
        let first = ranks.first().map(streams);
        if ranks.iter().all(|rank| Some(streams(rank)) == first) {
            for submitted in ranks.iter_mut().filter_map(|rank| rank.get_mut(kind)) {
                submitted.sort_by_key(|own| own.stream);
            }
        }
    }
    let wanted = |(kind, submitted): (&'static str, Vec<Submitted<T>>)| {
        let wanted = submitted.into_iter().map(|own| own.wanted);
        (kind, wanted.collect())
    };
    (ranks.into_iter())
        .map(|rank| rank.into_iter().map(wanted).collect())
        .collect()
}

/// A collective as a rank submitted it.
struct Submitted<T> {
    /// Place of its launch among the host calls; without one, that of the collective before it on
    /// its stream; `None`: there is none, and it was launched before the profile begins.
    launch: Option<usize>,
    stream: u64,
    wanted: T,
}

/// A rank's collectives by kind, in the order of their launches; those of one launch, or without
/// any, in the order of their starts.
fn by_launch<T>(
    member: &Member<'_>,
    of: impl Fn(usize) -> Option<T>,
) -> BTreeMap<&'static str, Vec<Submitted<T>>> {
    let launches = Launches::of(member.profile);
    let mut last: BTreeMap<u64, Option<usize>> = BTreeMap::new();
    let mut kinds: BTreeMap<&'static str, Vec<Submitted<T>>> = BTreeMap::new();
    for (kind, gpu) in collectives(member.profile, member.device) {
        let event = &member.profile.gpu[gpu];
        let last = last.entry(event.stream).or_default();
        *last = launches.index(event).or(*last);
        if let Some(wanted) = of(gpu) {
            kinds.entry(kind).or_default().push(Submitted {
                launch: *last,
                stream: event.stream,
                wanted,
            });
        }
    }
    for submitted in kinds.values_mut() {
        submitted.sort_by_key(|own| own.launch);
    }
    kinds
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
