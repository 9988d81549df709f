//! Exchange of a gateway's demand for its rows of the traffic plan. Failover to another hub is decided by the poll of the
//! route table ([`crate::table`]), because a healthy hub may have no plan.

use regions::RegionId;
use scheduler_api::paths;
use scheduler_api::plan::{DemandV1, GatewayWeights, WeightsV1};

use crate::hub::{ControlPlaneClient, EXCHANGE_TIMEOUT, HubCallError, HubRequest};
use crate::snapshot::Snapshot;

/// Exchange of a gateway in one region with the current hub.
#[derive(Debug)]
pub struct PlanExchange {
    client: ControlPlaneClient,
    gateway: RegionId,
    snapshot: Snapshot,
}

impl PlanExchange {
    /// Creates the exchange of the gateway in this region, whose current rows are in `snapshot`.
    pub fn new(client: ControlPlaneClient, gateway: RegionId, snapshot: Snapshot) -> PlanExchange {
        PlanExchange { client, gateway, snapshot }
    }

    /// Reports the demand. Returns the gateway's rows if they are newer than the current ones; they are on disk then.
    ///
    /// # Errors
    ///
    /// When there is no valid response; the current rows stay.
    pub async fn exchange(&mut self, demand: &DemandV1) -> Result<Option<GatewayWeights>, HubCallError> {
        let PlanExchange { client, gateway, snapshot } = self;
        let request = HubRequest::post(paths::demand(snapshot.generation()), demand, EXCHANGE_TIMEOUT);
        let hub = client.hubs().current().to_owned();
        let Some(rows) = client.send::<Option<WeightsV1>>(&request).await? else { return Ok(None) };
        let check = |rows: &mut GatewayWeights| match &rows.gateway {
            other if other == gateway => Ok(()),
            other => Err(format!("it is for the gateway in {other}, this gateway is in {gateway}")),
        };
        snapshot.accept(rows, check).await.map(Some).map_err(|failure| HubCallError { hub, failure })
    }
}
