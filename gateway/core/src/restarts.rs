//! Detection of the restart of a process behind an address, from its status.
//!
//! Observations about a process are kept while it is not ready, unreachable or overloaded, since a slow process is still
//! slow afterwards. They are reset only for another process, which has another boot id. A process without a boot id, of a
//! version that does not report it, counts as restarted when it is ready after it was not: another process may listen at an
//! address that refused a connection. A process that only responded late is still the same.

/// Last observed process behind an address.
#[derive(Debug, Default)]
pub struct ProcessObserver {
    /// Boot id of the last status; `None` before the first one.
    boot_id: Option<Option<u64>>,
    /// Whether the process has been replaced since the last status with which it was ready.
    is_new: bool,
}

impl ProcessObserver {
    /// Records a status. Returns whether it is the first one with which another process than before is ready.
    pub fn observed(&mut self, boot_id: Option<u64>, is_ready: bool) -> bool {
        let former = self.boot_id.replace(boot_id);
        self.is_new |= former.is_some_and(|former| former != boot_id);
        if is_ready {
            return std::mem::take(&mut self.is_new);
        }
        self.is_new |= boot_id.is_none();
        false
    }

    /// Records that no status was received, because the connection failed or the response is invalid.
    pub fn failed(&mut self) {
        // The next status of a process with a boot id shows whether it is another one.
        self.is_new |= matches!(self.boot_id, Some(None));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A status, or a failure.
    #[derive(Clone, Copy)]
    enum Step {
        Ready(Option<u64>),
        NotReady(Option<u64>),
        Failed,
    }
    use Step::{Failed, NotReady, Ready};

    /// Returns the numbers of the steps with which a restart is reported.
    fn restarts(steps: &[Step]) -> Vec<usize> {
        let mut process = ProcessObserver::default();
        let mut is_restart = |step: &Step| match *step {
            Ready(boot_id) => process.observed(boot_id, true),
            NotReady(boot_id) => process.observed(boot_id, false),
            Failed => {
                process.failed();
                false
            }
        };
        (0..steps.len()).filter(|number| is_restart(&steps[*number])).collect()
    }

    #[test]
    fn only_another_boot_id_is_a_restart_whatever_happens_to_the_readiness() {
        let (one, two) = (Some(1), Some(2));
        let check = |steps: &[Step], expected: &[usize]| assert_eq!(restarts(steps), expected);
        check(
            &[Ready(one), NotReady(one), Ready(one), Failed, Ready(one), Failed, NotReady(one), Ready(one)],
            &[],
        );
        check(&[NotReady(one), NotReady(one), Ready(one)], &[]);
        check(&[Ready(one), Ready(two), Ready(two)], &[1]);
        check(&[Ready(one), Failed, NotReady(two), NotReady(two), Ready(two), Ready(two)], &[4]);
        check(&[Ready(one), NotReady(two), NotReady(one), Ready(one)], &[3]);
        check(&[Failed, NotReady(one), Ready(one)], &[]);
    }

    #[test]
    fn a_process_without_a_boot_id_is_restarted_when_it_is_ready_again() {
        let none = None;
        let check = |steps: &[Step], expected: &[usize]| assert_eq!(restarts(steps), expected);
        check(&[Ready(none), Ready(none), Failed, Ready(none), Ready(none)], &[3]);
        check(&[Ready(none), NotReady(none), Ready(none)], &[2]);
        // Replacement by a newer version, and back.
        check(&[Ready(none), Ready(Some(1)), Ready(none), Ready(none)], &[1, 2]);
    }
}
