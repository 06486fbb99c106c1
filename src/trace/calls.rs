//! What a CUDA runtime or driver call does, by its name.

use super::event::Call;

impl Call {
    /// By name, as CUPTI gives it: `cudaLaunchKernel`, `cuLaunchKernelEx`, or with an ABI suffix
    /// such as `cudaLaunchKernel_v7000` or `cuStreamSynchronize_ptsz`.
    pub(super) fn of(name: &str) -> Self {
        let Some(call) = name
            .strip_prefix("cuda")
            .or_else(|| name.strip_prefix("cu"))
        else {
            return Self::Other;
        };
        if call.starts_with("GraphLaunch") {
            Self::GraphLaunch
        } else if call.starts_with("Launch") && !call.starts_with("LaunchHostFunc") {
            Self::Launch
        } else if matches_any(call, &["StreamSynchronize", "EventSynchronize"])
            || matches_any(
                call,
                &["DeviceSynchronize", "CtxSynchronize", "ThreadSynchronize"],
            )
        {
            Self::Synchronise
        } else if call.starts_with("EventRecord") {
            Self::EventRecord
        } else if call.starts_with("StreamWaitEvent") {
            Self::StreamWait
        } else if call.starts_with("Memset") {
            Self::Transfer
        } else if call.starts_with("Memcpy") {
            // A copy without `Async` returns when it is done.
            if call.contains("Async") {
                Self::Transfer
            } else {
                Self::Synchronise
            }
        } else {
            Self::Other
        }
    }

    /// Whether the call puts work on a stream.
    pub fn submits(self) -> bool {
        matches!(self, Self::Launch | Self::GraphLaunch | Self::Transfer)
    }
}

fn matches_any(call: &str, starts: &[&str]) -> bool {
    starts.iter().any(|start| call.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_apis_with_and_without_suffix() {
        for (name, call) in [
            ("cudaLaunchKernel", Call::Launch),
            ("cudaLaunchKernelExC_v11060", Call::Launch),
            ("cuLaunchKernelEx", Call::Launch),
            ("cudaLaunchHostFunc", Call::Other),
            ("cudaGraphLaunch_v10000", Call::GraphLaunch),
            ("cuGraphLaunch", Call::GraphLaunch),
            ("cudaGraphInstantiate", Call::Other),
            ("cudaMemcpyAsync_v3020", Call::Transfer),
            ("cuMemcpyHtoDAsync_v2", Call::Transfer),
            ("cudaMemcpy", Call::Synchronise),
            ("cudaMemsetAsync", Call::Transfer),
            ("cudaStreamSynchronize_ptsz", Call::Synchronise),
            ("cuCtxSynchronize", Call::Synchronise),
            ("cudaEventRecordWithFlags", Call::EventRecord),
            ("cudaStreamWaitEvent", Call::StreamWait),
            ("cudaEventQuery", Call::Other),
            ("INVALID", Call::Other),
        ] {
            assert_eq!(Call::of(name), call, "{name}");
        }
    }
}
