# Three regions in two clouds, each with a gateway and a spoke on one machine. Replicas are processes of the spoke. The hub runs
# elsewhere (docs/deploy/bare-metal.md): it has to exist before, because it creates the tokens with which the machines join.

locals {
  regions = toset(["aws/eu-central-1", "aws/us-east-1", "gcp/europe-west4"])

  # Commands that print the public address of a machine, from the metadata service of its cloud.
  address_commands = {
    aws = join(" ", [
      "curl -s -H \"X-aws-ec2-metadata-token: $(curl -s -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60'",
      "http://169.254.169.254/latest/api/token)\" http://169.254.169.254/latest/meta-data/public-ipv4",
    ])
    gcp = join(" ", [
      "curl -s -H 'Metadata-Flavor: Google'",
      "http://169.254.169.254/computeMetadata/v1/instance/network-interfaces/0/access-configs/0/external-ip",
    ])
  }

  user_data = {
    for region in local.regions : region => templatefile("${path.module}/cloud-init.yaml", {
      region          = region
      hub             = var.hub_address
      model           = var.model
      wheel_url       = var.wheel_url
      wheel_sha256    = var.wheel_sha256
      address_command = local.address_commands[split("/", region)[0]]
      spoke_token     = var.join_tokens["spoke/${region}"]
      gateway_token   = var.join_tokens["gateway/${region}"]
    })
  }
}

module "eu_central_1" {
  source          = "./aws"
  providers       = { aws = aws.eu_central_1 }
  image           = var.images["eu-central-1"]
  subnet          = var.subnets["aws/eu-central-1"]
  fleet_networks  = var.fleet_networks
  client_networks = var.client_networks
  user_data       = local.user_data["aws/eu-central-1"]
}

module "us_east_1" {
  source          = "./aws"
  providers       = { aws = aws.us_east_1 }
  image           = var.images["us-east-1"]
  subnet          = var.subnets["aws/us-east-1"]
  fleet_networks  = var.fleet_networks
  client_networks = var.client_networks
  user_data       = local.user_data["aws/us-east-1"]
}

resource "google_compute_instance" "europe_west4" {
  name         = "meridian"
  zone         = "europe-west4-a"
  machine_type = "c4-standard-4"
  tags         = ["meridian"]

  boot_disk {
    initialize_params {
      # An image with cloud-init.
      image = "ubuntu-os-cloud/ubuntu-2404-lts-amd64"
      type  = "hyperdisk-balanced"
      size  = 50
    }
  }

  network_interface {
    subnetwork = var.subnets["gcp/europe-west4"]
    access_config {}
  }

  metadata = {
    user-data = local.user_data["gcp/europe-west4"]
  }
}

resource "google_compute_firewall" "meridian" {
  for_each = {
    "7100" = var.fleet_networks
    "8080" = var.client_networks
  }
  name          = "meridian-${each.key}"
  network       = google_compute_instance.europe_west4.network_interface[0].network
  target_tags   = ["meridian"]
  source_ranges = each.value

  allow {
    protocol = "tcp"
    ports    = [each.key]
  }
}

output "gateways" {
  description = "Addresses of the gateways, for one name with latency-based DNS (docs/deploy/edge.md)"
  value = {
    "aws/eu-central-1" = module.eu_central_1.address
    "aws/us-east-1"    = module.us_east_1.address
    "gcp/europe-west4" = google_compute_instance.europe_west4.network_interface[0].access_config[0].nat_ip
  }
}
