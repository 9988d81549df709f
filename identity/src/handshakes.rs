//! Slots for connections whose peer is not authenticated yet.
//!
//! Each needs memory, a file descriptor and, for its handshake, about a millisecond of CPU time, so their number is
//! limited. A client that opens connections and sends nothing must not exclude the others: each network has a limit of
//! its own, which is far more than a network of honest processes needs, because a handshake takes milliseconds.

use std::collections::BTreeMap;
use std::net::IpAddr;

use regions::network::client_network;

/// Maximum number of slots.
pub const SLOTS_MAX: usize = 256;
/// Maximum number of slots of one network, so that none excludes all others.
pub const SLOTS_PER_NETWORK_MAX: usize = SLOTS_MAX / 2;

/// Taken slots.
#[derive(Debug, Default)]
pub struct HandshakeSlots {
    by_network: BTreeMap<IpAddr, usize>,
    taken: usize,
}

/// Reason for rejecting a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSlot {
    /// The listener performs the maximum number of TLS handshakes at a time.
    #[error("the maximum number of handshakes ({SLOTS_MAX}) is in progress")]
    Full,
    /// The network of the client has the maximum number of TLS handshakes at a time.
    #[error("the maximum number of handshakes of one network ({SLOTS_PER_NETWORK_MAX}) is in progress")]
    NetworkFull,
}

impl HandshakeSlots {
    /// Takes a slot for a client at this address.
    ///
    /// # Errors
    ///
    /// If a limit is reached.
    pub fn take(&mut self, address: IpAddr) -> Result<(), NoSlot> {
        if self.taken >= SLOTS_MAX {
            return Err(NoSlot::Full);
        }
        let of_network = self.by_network.entry(client_network(address)).or_default();
        if *of_network >= SLOTS_PER_NETWORK_MAX {
            return Err(NoSlot::NetworkFull);
        }
        *of_network += 1;
        self.taken += 1;
        Ok(())
    }

    /// Releases a slot that was taken for this address.
    pub fn release(&mut self, address: IpAddr) {
        let network = client_network(address);
        let Some(of_network) = self.by_network.get_mut(&network) else { return };
        *of_network -= 1;
        if *of_network == 0 {
            self.by_network.remove(&network);
        }
        self.taken -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_at_its_limit_leaves_slots_for_others() {
        let mut slots = HandshakeSlots::default();
        let [first, neighbour, other]: [IpAddr; 3] =
            ["2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"].map(|text| text.parse().unwrap());
        for _ in 0..SLOTS_PER_NETWORK_MAX {
            assert_eq!(slots.take(first), Ok(()));
        }
        assert_eq!(slots.take(neighbour), Err(NoSlot::NetworkFull));
        assert_eq!(slots.take(other), Ok(()));
        slots.release(first);
        assert_eq!(slots.take(neighbour), Ok(()), "a released slot is free again");
    }

    #[test]
    fn the_number_of_slots_is_limited_and_released_slots_leave_no_state() {
        let mut slots = HandshakeSlots::default();
        let address = |n: usize| IpAddr::from(u32::try_from(n).unwrap().to_be_bytes());
        for n in 0..SLOTS_MAX {
            assert_eq!(slots.take(address(n)), Ok(()));
        }
        assert_eq!(slots.take(address(SLOTS_MAX)), Err(NoSlot::Full));
        (0..SLOTS_MAX).for_each(|n| slots.release(address(n)));
        assert!(slots.by_network.is_empty() && slots.taken == 0);
        slots.release(address(0));
        assert_eq!(slots.taken, 0, "a release without a slot has no effect");
    }
}
