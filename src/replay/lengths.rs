//! Request lengths as the client draws them: NumPy's legacy global generator.

use rand_mt::Mt;

use crate::model::Workload;

/// Most steps that a replay makes room for in advance.
const MOST_ROOM: u64 = 1 << 16;

/// Prompt and output length of each request, in list order.
///
/// The client seeds NumPy's MT19937, draws every prompt length from `[int(isl * ratio), isl]`, then
/// every output length from `[int(osl * ratio), osl]`; nothing else is drawn in between.
pub fn draw(workload: &Workload) -> Vec<(u32, u32)> {
    let mut generator = Mt::new(workload.seed);
    let count = workload.requests as usize;
    let mut column = |longest: u32| -> Vec<u32> {
        let shortest = (f64::from(longest) * workload.length_ratio) as u32;
        (0..count)
            .map(|_| bounded(&mut generator, longest - shortest) + shortest)
            .collect()
    };
    let prompts = column(workload.isl);
    let outputs = column(workload.osl);
    prompts.into_iter().zip(outputs).collect()
}

/// About how many steps such requests take, so many at a time: what a replay makes room for.
pub(super) fn steps(lengths: &[(u32, u32)], concurrency: u32) -> usize {
    let tokens: u64 = lengths.iter().map(|(_, output)| u64::from(*output)).sum();
    (tokens / u64::from(concurrency.max(1))).min(MOST_ROOM) as usize
}

/// `RandomState.randint` for a range below 2^32: 32 bits, masked to the next power of two less
/// one, rejected until they fit. A range of one value draws nothing.
fn bounded(generator: &mut Mt, most: u32) -> u32 {
    if most == 0 {
        return 0;
    }
    let mask = u32::MAX >> most.leading_zeros();
    loop {
        let value = generator.next_u32() & mask;
        if value <= most {
            return value;
        }
    }
}
