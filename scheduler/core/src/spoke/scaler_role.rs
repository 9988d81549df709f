//! Role of a spoke in the scaling of its region: whether it scales, or another spoke does.
//!
//! The hub gives the scaler lease to one spoke of a region ([`scheduler_api::scaler`]). That spoke scales until it
//! learns of a higher epoch, from the hub or from another spoke: it does not stop because a hub is unreachable. So
//! during a partition two spokes may scale a region. Then there are too many replicas, never too few.
//!
//! A spoke that no hub has responded to, and that hears of no scaler, scales without a lease: a region that restarts
//! while all hubs are unreachable is not left without replicas. Before that it waits for [`SCALER_SILENCE_MAX`], in
//! which a scaler that runs makes contact.

use std::time::{Duration, Instant};

use scheduler_api::scaler::{ScalerEpoch, ScalerLease};

/// Time without an exchange after which a spoke no longer relies on the scaler of its region: five exchanges.
pub const SCALER_SILENCE_MAX: Duration = Duration::from_secs(5);
/// Time without a response after which the hub counts as unreachable: two lease times.
const HUB_SILENCE_MAX: Duration = Duration::from_secs(10);
/// Time after which a response of the hub counts although this spoke has seen a higher epoch: longer than a response may be
/// under way. A message with an epoch that the hub has never granted stops the scaling of a region for this time at most.
const OVERTAKEN_MAX: Duration = Duration::from_secs(20);
/// Time for which a spoke asks the hub for a lease that its holder has given up.
const RELEASE_MAX: Duration = Duration::from_secs(5);

/// Role of a spoke in the scaling of its region.
#[derive(Debug, Default)]
pub(super) struct ScalerRole {
    /// Highest epoch that this spoke has seen.
    highest: Option<ScalerEpoch>,
    /// Time at which it saw that epoch first.
    highest_since: Option<Instant>,
    /// Epoch of the lease that it holds.
    held: Option<ScalerEpoch>,
    /// The hub has granted the lease to no spoke.
    is_free: bool,
    /// Time of the hub's last response.
    hub_responded: Option<Instant>,
    /// Time of the last exchange with the scaler.
    scaler_heard: Option<Instant>,
    /// Time of the first question for the role.
    asked_since: Option<Instant>,
    /// Epoch that its holder has given up, and the time at which this spoke learned of it.
    released: Option<(ScalerEpoch, Instant)>,
}

impl ScalerRole {
    /// Records a response of the hub to the spoke `boot_id`.
    pub(super) fn hub_responded(&mut self, lease: Option<ScalerLease>, boot_id: u64, now: Instant) {
        self.hub_responded = Some(now);
        self.is_free = lease.is_none();
        let is_overtaken = |lease: &ScalerLease| {
            let is_recent = |since: Instant| now.saturating_duration_since(since) <= OVERTAKEN_MAX;
            Some(lease.epoch) < self.highest && self.highest_since.is_some_and(is_recent)
        };
        // A response that was overtaken by a newer epoch has no effect.
        let Some(lease) = lease.filter(|lease| !is_overtaken(lease)) else { return };
        if self.highest != Some(lease.epoch) {
            (self.highest, self.highest_since) = (Some(lease.epoch), Some(now));
        }
        self.held = (lease.boot_id == boot_id).then_some(lease.epoch);
    }

    /// Records a contact of the scaler with this epoch; returns whether it is the newest one.
    pub(super) fn scaler_contacted(&mut self, epoch: ScalerEpoch, releases: bool, now: Instant) -> bool {
        if Some(epoch) < self.highest || self.held == Some(epoch) {
            return false;
        }
        self.epoch_seen(epoch, now);
        self.scaler_heard = Some(now);
        if releases && self.released.is_none_or(|(released, _)| released < epoch) {
            self.released = Some((epoch, now));
        }
        true
    }

    /// Records an epoch that another spoke has seen.
    pub(super) fn epoch_seen(&mut self, epoch: ScalerEpoch, now: Instant) {
        if Some(epoch) > self.highest {
            (self.highest, self.highest_since) = (Some(epoch), Some(now));
            self.held = None;
        }
    }

    /// Returns whether this spoke scales the region.
    pub(super) fn is_scaler(&mut self, now: Instant) -> bool {
        let within = |at: Option<Instant>, max| at.is_some_and(|at| now.saturating_duration_since(at) <= max);
        let asked_since = *self.asked_since.get_or_insert(now);
        if self.held.is_some() {
            true
        } else if within(self.scaler_heard, SCALER_SILENCE_MAX) {
            false
        } else if within(self.hub_responded, HUB_SILENCE_MAX) {
            self.is_free
        } else {
            now.saturating_duration_since(asked_since) >= SCALER_SILENCE_MAX
        }
    }

    /// Returns whether another spoke has been in contact recently as the scaler.
    pub(super) fn hears_scaler(&self, now: Instant) -> bool {
        let recent = |at: Instant| now.saturating_duration_since(at) <= SCALER_SILENCE_MAX;
        self.held.is_none() && self.scaler_heard.is_some_and(recent)
    }

    /// Returns the epoch of the lease that this spoke holds.
    pub(super) fn held(&self) -> Option<ScalerEpoch> {
        self.held
    }

    /// Returns the highest epoch that this spoke has seen.
    pub(super) fn highest(&self) -> Option<ScalerEpoch> {
        self.highest
    }

    /// Returns whether to ask the hub for the lease now, because its holder has given it up.
    pub(super) fn is_released(&self, now: Instant) -> bool {
        self.released.is_some_and(|(epoch, at)| {
            Some(epoch) == self.highest && now.saturating_duration_since(at) <= RELEASE_MAX
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    const OWN: u64 = 7;
    const OTHER: u64 = 8;
    const S: Duration = Duration::from_secs(1);

    fn epoch(revision: u64) -> ScalerEpoch {
        ScalerEpoch { store: 1, revision }
    }

    fn lease(boot_id: u64, revision: u64) -> Option<ScalerLease> {
        Some(ScalerLease { boot_id, epoch: epoch(revision) })
    }

    #[test]
    fn the_holder_scales_without_a_hub_until_it_learns_of_a_higher_epoch() {
        let (mut role, now) = (ScalerRole::default(), some_instant());
        role.hub_responded(lease(OWN, 4), OWN, now);
        assert!(role.is_scaler(now) && role.is_scaler(now + 3600 * S), "the hub is silent for an hour");
        assert!(!role.scaler_contacted(epoch(3), false, now), "a former holder");
        assert!(role.is_scaler(now));
        role.epoch_seen(epoch(5), now + S);
        assert!(!role.is_scaler(now + S), "it learned it from a peer, before the new holder made contact");
        role.hub_responded(lease(OWN, 4), OWN, now + S);
        assert!(!role.is_scaler(now + S), "a response that was overtaken");
        role.hub_responded(lease(OWN, 6), OWN, now + 2 * S);
        assert!(role.is_scaler(now + 2 * S) && role.held() == Some(epoch(6)));
        role.hub_responded(lease(OTHER, 9), OWN, now + 3 * S);
        assert!(!role.is_scaler(now + 3 * S));
    }

    #[test]
    fn an_epoch_that_the_hub_has_not_granted_stops_the_holder_for_a_limited_time() {
        let (mut role, now) = (ScalerRole::default(), some_instant());
        role.hub_responded(lease(OWN, 4), OWN, now);
        role.epoch_seen(epoch(u64::MAX), now);
        role.hub_responded(lease(OWN, 4), OWN, now + OVERTAKEN_MAX);
        assert!(!role.is_scaler(now + OVERTAKEN_MAX));
        let later = now + OVERTAKEN_MAX + Duration::from_millis(1);
        role.hub_responded(lease(OWN, 4), OWN, later);
        assert!(role.is_scaler(later) && role.highest() == Some(epoch(4)));
    }

    #[test]
    fn a_spoke_does_not_scale_beside_the_holder() {
        let (mut role, now) = (ScalerRole::default(), some_instant());
        role.hub_responded(lease(OTHER, 4), OWN, now);
        assert!(!role.is_scaler(now));
        assert!(role.scaler_contacted(epoch(4), false, now + 20 * S));
        assert!(!role.is_scaler(now + 25 * S), "no hub responds, and the holder is there");
        assert!(role.is_scaler(now + 26 * S), "neither the hub nor the holder is there");
        assert!(role.scaler_contacted(epoch(4), false, now + 27 * S));
        assert!(!role.is_scaler(now + 27 * S), "it is back");
        role.hub_responded(lease(OTHER, 4), OWN, now + 40 * S);
        assert!(!role.is_scaler(now + 40 * S), "the hub still counts it");
    }

    #[test]
    fn a_spoke_that_restarts_while_no_hub_responds_waits_for_a_scaler_and_then_scales() {
        let (mut role, now) = (ScalerRole::default(), some_instant());
        assert!(!role.is_scaler(now));
        assert!(!role.is_scaler(now + SCALER_SILENCE_MAX - Duration::from_millis(1)));
        assert!(role.is_scaler(now + SCALER_SILENCE_MAX));
    }

    #[test]
    fn a_spoke_scales_with_a_hub_that_grants_no_lease() {
        let (mut role, now) = (ScalerRole::default(), some_instant());
        role.hub_responded(None, OWN, now);
        assert!(role.is_scaler(now));
        assert!(role.scaler_contacted(epoch(1), false, now));
        assert!(!role.is_scaler(now), "a scaler made contact");
    }

    #[test]
    fn a_released_lease_is_asked_for_until_another_spoke_holds_it() {
        let (mut role, now) = (ScalerRole::default(), some_instant());
        role.scaler_contacted(epoch(4), false, now);
        assert!(!role.is_released(now));
        role.scaler_contacted(epoch(4), true, now);
        assert!(role.is_released(now) && role.is_released(now + RELEASE_MAX));
        assert!(!role.is_released(now + RELEASE_MAX + S), "for a limited time");
        role.hub_responded(lease(OTHER, 5), OWN, now);
        assert!(!role.is_released(now));
    }
}
