//! Exchange of the demand of tenants at a gateway for the gateway's shares of their rate limits. Failover to another hub is
//! decided by the poll of the route table ([`crate::table`]).

use regions::Generation;
use scheduler_api::paths;
use scheduler_api::plan::{SharesResponseV1, TenantDemand, TenantDemandV1, TenantShares};

use crate::hub::{ControlPlaneClient, EXCHANGE_TIMEOUT, HubCallError, HubRequest};
use crate::snapshot::Snapshot;

/// Exchange of one gateway with the current hub.
#[derive(Debug)]
pub struct ShareExchange {
    client: ControlPlaneClient,
    snapshot: Snapshot,
    current: Option<TenantShares>,
}

/// Accepted response of the hub.
#[derive(Debug)]
pub struct ReceivedShares {
    /// Number of gateways that the hub knows, with this one.
    pub gateways: u32,
    /// All shares of this gateway, if they are newer than the current ones. They are on disk.
    pub shares: Option<TenantShares>,
}

impl ShareExchange {
    /// Creates the exchange of a gateway whose current shares are in `snapshot`.
    pub fn new(
        client: ControlPlaneClient,
        snapshot: Snapshot,
        current: Option<TenantShares>,
    ) -> ShareExchange {
        ShareExchange { client, snapshot, current }
    }

    /// Returns the generation of the current shares.
    pub fn running(&self) -> Option<Generation> {
        self.current.as_ref().map(|shares| shares.generation)
    }

    /// Reports the demand and receives newer shares.
    ///
    /// # Errors
    ///
    /// When there is no valid response; the current shares stay.
    pub async fn exchange(&mut self, demand: &TenantDemand) -> Result<ReceivedShares, HubCallError> {
        let ShareExchange { client, snapshot, current } = self;
        let request = HubRequest::post(paths::TENANT_DEMAND, &TenantDemandV1::from(demand), EXCHANGE_TIMEOUT);
        let hub = client.hubs().current().to_owned();
        let SharesResponseV1 { version: _, gateways, shares } = client.send(&request).await?;
        let Some(shares) = shares else { return Ok(ReceivedShares { gateways, shares: None }) };
        let check = |shares: &mut TenantShares| {
            if shares.gateway != demand.gateway {
                return Err(format!("it is for another gateway, in {}", shares.gateway.region));
            }
            shares.complete(current.as_ref())
        };
        let accepted = snapshot.accept(shares, check).await;
        let shares = accepted.map_err(|failure| HubCallError { hub, failure })?;
        *current = Some(shares.clone());
        Ok(ReceivedShares { gateways, shares: Some(shares) })
    }
}
